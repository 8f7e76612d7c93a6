"""Which fields each rule reads, told from its source: a run takes one way through a rule, and a
reader wants all of them.

The types of parameters are annotated, so `plan.parallel.tp` is followed through local names,
properties and the functions that a rule calls. Where a name is computed (`getattr(section, name)`),
every field of that section which the function or a table it uses spells out counts as read.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

from pyrl_ext.plan.language.errors import Key
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules import RULES, sentence
from pyrl_ext.plan.schema import Config, Section

_SECTIONS = {
    field.annotation: (name,)
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
# What the plan took from a file is read through the key that names the file.
_DERIVED: dict[str, Key] = {"hf": ("model", "config")}


@cache
def rules_of_fields() -> dict[Key, list[tuple[str, str]]]:
    """Field -> (key it reports at, sentence) of the rules that read it."""
    found: dict[Key, list[tuple[str, str]]] = defaultdict(list)
    for key, rule in RULES:
        for field in sorted(fields_read(rule)):
            found[field].append((key, sentence(rule)))
    return found


def fields_read(function: Callable[..., Any]) -> set[Key]:
    """The fields of the YAML that `function`, or anything it calls, may read."""
    read: set[Key] = set()
    seen: set[FunctionType] = set()
    waiting = [inspect.unwrap(function)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, FunctionType) and each not in seen and _is_ours(each):
            seen.add(each)
            keys, called = _look_into(each)
            read |= keys
            waiting += called
    return read


def _is_ours(function: FunctionType) -> bool:
    return function.__module__.startswith(__package__ or "") and function.__name__ != "<lambda>"


@cache
def _look_into(function: FunctionType) -> tuple[set[Key], list[Any]]:
    """The fields that one function reads itself, and the functions it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    scope = _Scope(function, tree)
    read: set[Key] = set()
    called: list[Any] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            called.append(scope.globals.get(node.id))
        elif isinstance(node, ast.Attribute):
            called.append(scope.module_member(node))
            owner = scope.type_of(node.value)
            read |= _field(owner, node.attr)
            called.append(_code(inspect.getattr_static(owner, node.attr, None) if owner else None))
        elif isinstance(node, ast.Call) and scope.computes_a_name(node):
            for owner in map(scope.type_of, node.args):
                read |= _spelt_out(owner, scope.words)
    return read, called


def _field(owner: type | None, name: str) -> set[Key]:
    if owner is None or not issubclass(owner, Config):
        fields = getattr(owner, "model_fields", {})
        return {(*_SECTIONS[owner], name)} if owner in _SECTIONS and name in fields else set()
    if name in _DERIVED:
        return {_DERIVED[name]}
    known = name in Config.model_fields and Config.model_fields[name].annotation not in _SECTIONS
    return {(name,)} if known else set()


def _spelt_out(owner: type | None, words: set[str]) -> set[Key]:
    """Fields of `owner`, and of its sections, that are named by `words`."""
    read = {key for word in words for key in _field(owner, word)}
    if owner is Plan:
        for section, (name,) in _SECTIONS.items():
            read |= _spelt_out(section, words) if name in words else set()
    return read


def _code(member: Any) -> Any:
    """The function behind a property or a method."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, cached_property) else member


class _Scope:
    """What the names in one function stand for."""

    def __init__(self, function: FunctionType, tree: ast.Module) -> None:
        self.globals: dict[str, Any] = vars(builtins) | function.__globals__
        self.types: dict[str, type] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                self.globals |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
        for name, kind in get_type_hints(function, self.globals).items():
            self._bind(name, kind)
        if owner := self._owner(function):
            self._bind("self", owner)
        for _ in range(2):  # a name may be bound below the function that uses it
            for target, value in _assignments(tree):
                self._bind(target, self.type_of(value))
        self.words = set(self._words(tree))

    def _owner(self, function: FunctionType) -> Any:
        """The class that a method is defined in."""
        *parts, _ = function.__qualname__.split(".")
        return self.globals.get(parts[0]) if len(parts) == 1 else None

    def _bind(self, name: str, kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, Section):
            self.types[name] = Plan if issubclass(kind, Config) else kind

    def type_of(self, node: ast.AST) -> type | None:
        """The section, or the plan, that an expression stands for."""
        if isinstance(node, ast.Name):
            return self.types.get(node.id)
        if isinstance(node, ast.NamedExpr):
            return self.type_of(node.value)
        owner = self.type_of(node.value) if isinstance(node, ast.Attribute) else None
        if owner is None or not isinstance(node, ast.Attribute) or not issubclass(owner, Section):
            return None
        field = owner.model_fields.get(node.attr)
        return field.annotation if field and field.annotation in _SECTIONS else None

    def module_member(self, node: ast.Attribute) -> Any:
        """`function` of `module.function`."""
        module = self.globals.get(node.value.id) if isinstance(node.value, ast.Name) else None
        return getattr(module, node.attr, None) if isinstance(module, ModuleType) else None

    def computes_a_name(self, call: ast.Call) -> bool:
        """Whether it is `getattr`, or takes any section and so reads it by name."""
        called = self.globals.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if isinstance(called, FunctionType) and _is_ours(called):
            return Section in get_type_hints(called).values()
        return called is getattr

    def _words(self, tree: ast.Module) -> Iterator[str]:
        """Text that the function spells out, and that the module's tables it uses do."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from node.value.split(".")
            table = self.globals.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(table, dict | list | tuple | set | frozenset):
                for entry in [*table, *(table.values() if isinstance(table, dict) else ())]:
                    if isinstance(entry, str):
                        yield from entry.split(".")


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.NamedExpr):
            yield node.target.id, node.value
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts):
                    if isinstance(name, ast.Name):
                        yield name.id, value
