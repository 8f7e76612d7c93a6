"""Explains a key: its type, its value in a plan, where that came from, and the rules on it."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyrl_ext.plan.language.errors import (
    ConfigError,
    Key,
    Problem,
    field_key,
    fields_of,
    kind_at,
    show,
    unknown,
)
from pyrl_ext.plan.language.fields import NO_BOUNDS, Section
from pyrl_ext.plan.language.kind import REQUIRED
from pyrl_ext.plan.language.resolve import unit_of
from pyrl_ext.plan.language.yaml_tree import Source
from pyrl_ext.plan.schema.objective import Objective
from pyrl_ext.plan.schema.turns import Turns
from pyrl_ext.plan.show.formula import formula

_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def explain(name: str, source: Source | None, console: Console) -> None:
    """Print the explanation of `section.key`, of a section, or of a key without a section.

    Args:
        name: as it is written on the command line
        source: the resolved configuration; None: explain from the schema alone
        console: where to print

    Raises:
        ConfigError: there is no such key
    """
    key = tuple(name.split("."))
    field = field_key(key)
    around = ".".join(field_key(key))
    message = None
    if field[-1] not in fields_of(*field[:-1]):
        message = unknown(field)
    elif fields_of(*key):
        return _explain_section(key, source, console)
    elif key != field:
        message = f"unknown key, expected {around}, which is explained as a whole"
        if not field[1:]:
            message = f"{around} is a single value, it has no keys"
    if message:
        raise ConfigError([Problem(f"command line: --explain {name}", 0, message)])
    console.print(f"[bold]{name}[/]  {escape(about(field_of(key)))}")
    table = Table(box=None, pad_edge=False, show_header=False)
    for label, text in _facts(key, source):
        table.add_row(label, escape(text))
    console.print(table)


def _explain_section(section: Key, source: Source | None, console: Console) -> None:
    words = str(kind_at(section).__doc__)
    console.print(f"[bold]{'.'.join(section)}[/]  {escape(words)}")
    table = Table(box=None, pad_edge=False)
    for column in ("key", "type", "default", "value" if source else "", "meaning"):
        if column:
            table.add_column(column, overflow="fold")
    for name, field in fields_of(*section).items():
        key = (*section, name)
        value = [show(value_of(key, source))] if source else []
        row = [name, type_of(field), default_of(field, key), *value, about(field)]
        table.add_row(*map(escape, row))
    console.print(table)
    if section == ("objective",) and source:
        objective = Objective.model_validate(source.tree.get("objective", {}))
        turns = Turns.model_validate(source.tree.get("turns") or {})
        each = (source.tree.get("rollout") or {}).get("max_new_tokens") or 0
        for line in formula(objective, turns.most_sampled(each)):
            console.print(escape(line))


def _facts(key: Key, source: Source | None) -> Iterator[tuple[str, str]]:
    field = field_of(key)
    yield "type", type_of(field)
    if unit := unit_of(field):
        yield "unit", unit
    yield "default", default_of(field, key)
    if source:
        yield "value", show(value_of(key, source)) if key not in source.failed else "unknown"
        yield "from", came_from(key, source)
        for problem in source.problems:
            if problem.message.startswith(f"{'.'.join(key)}: "):
                yield "problem", f"{problem.where}: {problem.message}"


def field_of(key: Key) -> FieldInfo:
    """The schema's field of a known key."""
    return fields_of(*key[:-1])[key[-1]]


def about(field: FieldInfo) -> str:
    """The meaning of a field in words."""
    return field.description or ""


def value_of(key: Key, source: Source) -> object:
    """The value in `source`, or the default; None for a required field that is missing."""
    tree: Any = source.tree
    for part in key:
        if not isinstance(tree, dict) or part not in tree:
            field = field_of(key)
            return None if field.is_required() else field.get_default(call_default_factory=True)
        tree = tree[part]
    return tree


def came_from(key: Key, source: Source) -> str:
    """The origin of a value: an override, a line of the file or of a parent, or the default."""
    tree: Any = source.tree
    for part in key[:-1]:
        tree = tree.get(part, {})
    if not isinstance(tree, dict) or key[-1] not in tree:
        return "missing, it has no default" if field_of(key).is_required() else "the default"
    if key[0] == "objective" and key not in {*source.places, *source.overrides}:
        return f"preset {tree['preset']}"
    _, place = source.origin(key)
    if isinstance(place, str):
        return f"command line: {place}"
    parent = "" if place.file == source.path else ", a parent"
    return f"{place.file}:{place.line}{parent}"


def default_of(field: FieldInfo, key: Key) -> str:
    """The default as it would be written."""
    if field.is_required():
        return "required"
    for rollouts, word in ((True, "with"), (False, "without")):
        if key in REQUIRED[rollouts]:
            return f"required {word} rollouts"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, str):
        return default
    if isinstance(default, Section):
        return "{}"
    return show(list(default) if isinstance(default, tuple) else default)


def type_of(field: FieldInfo) -> str:
    """The type of a field in words, with its bounds."""
    return _type_of(field.annotation, field.metadata)


def _type_of(annotation: Any, marks: Iterable[object] = ()) -> str:
    kind = get_origin(annotation)
    inner = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type_of(inner[0], annotation.__metadata__)
    if kind in (Union, types.UnionType):
        return ", or ".join(_type_of(each) for each in inner)
    if kind is Literal:
        return " | ".join(inner)
    if annotation is type(None):
        return "null"
    if kind is list:
        return f"list, each a {_type_of(inner[0])}"
    if kind is tuple:
        first = _type_of(inner[0])
        last = _type_of(inner[-1])
        each = f"each a {first}" if first == last else f"a {first}; then each a {last}"
        return f"list of {len(inner)}, {each}"
    if kind is dict or issubclass(annotation, Section):
        return "mapping"
    return ", ".join([_KINDS[annotation], *_bounds(marks)])


def _bounds(marks: Iterable[object]) -> Iterator[str]:
    for mark in marks:
        yield from _bounds(getattr(mark, "metadata", ()))  # pydantic's Field inside Annotated
        for name, words in _BOUNDS.items():
            if (bound := getattr(mark, name, None)) is not None and bound not in NO_BOUNDS:
                yield f"{words} {bound}"
