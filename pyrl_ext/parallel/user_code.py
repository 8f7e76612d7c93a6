"""Functions that a plan names as ``package.module:function``, and how their errors are shown."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from operator import attrgetter
from typing import Any

_SHOWN = 500  # characters of an error that user code raised


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


def load_function(
    key: str, name: str, num_args: int, builtin: Sequence[str] = (), **given: Any
) -> Callable[..., Any]:
    """The function called ``name``, importable from where the run was started.

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
    try:
        signature = inspect.signature(function)
        bound = partial(function, **{k: v for k, v in given.items() if k in signature.parameters})
        inspect.signature(bound).bind(*range(num_args))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key}: {name!r}: {describe(error)}, expected a Python function of {num_args} "
            "positional arguments"
        ) from error
    return update_wrapper(bound, function)


def load_callable(key: str, name: str) -> Callable[..., Any]:
    """The function or class called ``name``.

    Raises:
        ValueError: as `load_function`, but for its arguments.
    """
    module_name, _, attribute = name.partition(":")
    where = f"{key}: {name!r}"
    try:
        function: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        rule = (
            "expected a module that imports. Run from the folder that holds it, or set PYTHONPATH"
        )
        raise ValueError(f"{where}: no module {error.name!r}, {rule}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        fault = f"module {module_name} raised {describe(error)}"
        raise ValueError(f"{where}: {place}: {fault}, expected a module that imports") from error
    try:
        function = attrgetter(attribute)(function)
    except AttributeError as error:
        raise ValueError(f"{where}: {describe(error)}, expected a function of it") from error
    if not callable(function):
        raise ValueError(f"{where}: a {type(function).__name__}, expected a function")
    return function
