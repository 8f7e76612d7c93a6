"""Functions of the user that a plan names as ``package.module:function``, found without running
any of their code."""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.language.paths import relative

_LONGEST = 4_000_000  # bytes of a module
_SHOWN = 20  # names


def function_problem(name: str, folder: str, takes: Sequence[str] = ()) -> str | None:
    """Why the function or class ``name``, written as ``package.module:function``, cannot be
    imported or called; None: it can, or only running its module tells.

    Args:
        folder: searched for modules after sys.path; that of the YAML file that names it
        takes: the positional arguments that a function is called with; empty: not looked at
    """
    module, _, attribute = name.partition(":")
    found = find_module(module, folder)
    if isinstance(found, str):
        return (
            f"{show(name)}: no module {found!r}, expected one next to the YAML file "
            f"({relative(folder)}), in the working directory or on the Python path. Put it there, "
            "or set PYTHONPATH"
        )
    if found is None or not (found.origin or "").endswith(".py"):
        return None
    file = Path(str(found.origin))
    try:
        if file.stat().st_size > _LONGEST:
            return None
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        place = f"{relative(str(file))}:{error.lineno}"
        return f"{show(name)}: {place}: {error.msg}, expected a module that imports"
    except (OSError, ValueError, RecursionError):
        return None
    wanted = attribute.split(".")[0]
    bound = {*_names(tree.body)}
    if wanted in bound and takes and wanted == attribute:
        return _signature_problem(name, file, _only_function(tree.body, wanted), takes)
    if wanted in bound or "*" in bound or "__getattr__" in bound:
        return None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    written = [each.name for each in tree.body if isinstance(each, kinds)]
    public = [each for each in written if not each.startswith("_")]
    close = difflib.get_close_matches(wanted, public, n=1)
    hint = f". Did you mean {close[0]}?" if close else ""
    there = ", ".join(public[:_SHOWN]) or "a function, but it has none"
    where = relative(str(file))
    return f"{show(name)}: no {wanted!r} in {where}, expected one of {there}{hint}"


def _only_function(
    body: Sequence[ast.stmt], name: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function that ``name`` is bound to, if a single undecorated definition at the top of the
    module binds it."""
    binding = [each for each in body if name in _names([each])]
    if len(binding) != 1:
        return None
    (only,) = binding
    if isinstance(only, ast.FunctionDef | ast.AsyncFunctionDef) and not only.decorator_list:
        return only
    return None


def _signature_problem(
    name: str,
    file: Path,
    function: ast.FunctionDef | ast.AsyncFunctionDef | None,
    takes: Sequence[str],
) -> str | None:
    """Why a function cannot be called with the positional arguments ``takes``."""
    if function is None:
        return None
    own = function.args
    positional = [*own.posonlyargs, *own.args]
    needed = len(positional) - len(own.defaults)
    most = len(takes) if own.vararg else len(positional)
    if needed <= len(takes) <= most and None not in own.kw_defaults:
        return None
    return (
        f"{show(name)}: {relative(str(file))}:{function.lineno}: {function.name} takes "
        f"({ast.unparse(own)}), expected {len(takes)} positional arguments: {', '.join(takes)}"
    )


def find_module(module: str, folder: str) -> ModuleSpec | str | None:
    """Where ``module`` is; the package or module that is missing; None: cannot be told."""
    parts = module.split(".")
    try:
        spec = find_spec(parts[0]) or PathFinder.find_spec(parts[0], [folder])
    except (ValueError, ImportError):  # a module that was made while the program runs
        return None
    if spec is None or parts[0] == "__main__":
        return None if spec else parts[0]
    folders = _folders(spec, parts[0], [*sys.path, folder])
    for depth in range(2, len(parts) + 1):
        inner = ".".join(parts[:depth])
        last = parts[depth - 1]
        spec = PathFinder.find_spec(last, folders)
        if spec is None:
            return inner
        folders = _folders(spec, last, folders)
    return spec


def _folders(spec: ModuleSpec, name: str, around: Sequence[str]) -> list[str]:
    """The folders that hold the modules of a package; empty: it is a module."""
    if spec.submodule_search_locations is None:
        return []
    if spec.origin is None:  # without __init__.py: a namespace asks for its imported parent
        folders = (os.path.join(each, name) for each in around)
        return [each for each in folders if os.path.isdir(each)]
    return [*spec.submodule_search_locations]


def _names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module bind, those in branches included; ``*``: unknown ones."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.split(".")[0]
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for field in ("body", "orelse", "finalbody"):
                    yield from _names(getattr(statement, field, []))
                for handler in getattr(statement, "handlers", []):
                    yield from _names(handler.body)
                yield from _targets(statement)
            case _:
                yield from _targets(statement)


def _targets(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement assigns; ``*`` where it may assign others."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr"):
            yield "*"
