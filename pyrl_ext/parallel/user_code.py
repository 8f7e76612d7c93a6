"""Functions that a plan names as ``package.module:function``, and how their errors are shown."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import pyrl_ext

_SHOWN = 500  # characters of an error that user code raised
_NOT_THEIRS = tuple(f"{Path(file).parent}/" for file in (pyrl_ext.__file__, asyncio.__file__))


def find_modules_in(folder: str) -> None:
    """Import modules of ``folder``, too, where no other place has one of that name."""
    if folder not in sys.path:
        sys.path.append(folder)


def printable(text: str, limit: int = _SHOWN) -> str:
    """``text`` cut after ``limit`` characters, with lone surrogates escaped so that it prints."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shown(value: object, limit: int = _SHOWN) -> str:
    """``repr(value)``, cut, on a line that prints."""
    try:
        return printable(repr(value), limit)
    except Exception as error:  # an int of 5,000 digits, or a repr of the user's
        return f"a {type(value).__name__} whose repr raised {type(error).__name__}"


def describe(error: BaseException) -> str:
    """``Type: message`` of an error that user code raised, on a line that prints."""
    try:
        message = str(error)
    except Exception as unprintable:
        message = f"its message raised {type(unprintable).__name__}"
    return f"{type(error).__name__}: {printable(message)}".removesuffix(": ")


def place_of(error: BaseException, skip: Sequence[str] = ()) -> str:
    """`` (file:line)`` of an error, for messages; empty if there is none.

    It is the last line on the stack in the file that this package, or asyncio, called.

    Args:
        skip: packages that call user code, too
    """
    folders = tuple(f"{Path(str(sys.modules[name].__file__)).parent}/" for name in skip)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS + folders)]
    if not theirs:
        return ""
    last = [frame for frame in theirs if frame.filename == theirs[0].filename][-1]
    return f" ({printable(last.filename)}:{last.lineno})"


def load_function(
    key: str, name: str, num_args: int, builtin: Sequence[str] = (), **given: Any
) -> Callable[..., Any]:
    """The function called ``name``, importable from the folder of the YAML file or from where the
    run was started.

    Args:
        key: the config key that holds the name, for messages.
        name: ``package.module:function``.
        num_args: positional arguments that it is called with.
        builtin: names that need no module, for messages.
        given: passed to the function if it has a parameter of that name.

    Raises:
        ValueError: the name has no colon; the module or the function is missing; the module does
            not import; the function does not take ``num_args`` positional arguments.
    """
    if not all(name.partition(":")):
        accepted = " or ".join([*builtin, "package.module:function"])
        raise ValueError(f"{key}: {name!r}, expected {accepted}")
    function = load_callable(key, name)
    return update_wrapper(_bound(f"{key}: {name!r}", function, num_args, given), function)


def load_callable(key: str, name: str) -> Callable[..., Any]:
    """The function or class called ``name``.

    Raises:
        ValueError: as `load_function`, but for its arguments.
    """
    module_name, _, attribute = name.partition(":")
    where = f"{key}: {name!r}"
    function = load_module(where, module_name)
    for part in attribute.split("."):
        if not hasattr(function, part):
            public = sorted(n for n in dir(function) if not n.startswith("_"))
            shown = printable(", ".join(public)) or "nothing"
            raise ValueError(f"{where}: no {part!r} in {module_name}, expected one of: {shown}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(f"{where}: a {type(function).__name__}, expected a function")
    return function


def load_module(where: str, module_name: str) -> Any:
    """The module called ``module_name``.

    Args:
        where: config key and value, for messages

    Raises:
        ValueError: it is missing, or does not import
    """
    rule = "expected a module that imports"
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ValueError(
                f"{where}: module {module_name} imports {missing!r}, which is missing, {rule}"
            ) from error
        raise ValueError(
            f"{where}: no module {missing!r}, expected one on the Python path. Put it next to the "
            "YAML file, run from the folder that holds it, or set PYTHONPATH"
        ) from error
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise ValueError(f"{where}: {place}: {describe(error)}, {rule}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
        raise ValueError(
            f"{where}: {place}: module {module_name} raised {describe(error)}, {rule}"
        ) from error


def _bound(
    where: str, function: Callable[..., Any], num_args: int, given: dict[str, Any]
) -> partial[Any]:
    """``function`` with the ``given`` arguments that it has parameters for, its signature checked.

    Raises:
        ValueError: it has no signature, or does not take ``num_args`` positional arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: {describe(error)}, expected a Python function of {num_args} positional "
            "arguments. Wrap it in one"
        ) from error
    bound = partial(function, **{k: v for k, v in given.items() if k in signature.parameters})
    try:
        inspect.signature(bound).bind(*range(num_args))
    except TypeError as error:
        raise ValueError(
            f"{where} takes {signature}, expected {num_args} positional arguments"
        ) from error
    return bound
