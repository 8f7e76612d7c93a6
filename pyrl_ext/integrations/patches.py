"""Replace a function of another package in every module that holds it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import reduce, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

OURS = "__pyrl_ext__"  # attribute of a replacement: the name of the function that it calls


class Replaced(NamedTuple):
    """One replaced function.

    Args:
        theirs: "module:name" or "module:Class.name".
        ours: "module.name" of what runs now.
        holders: names of the modules or of the class that hold it, sorted.
    """

    theirs: str
    ours: str
    holders: tuple[str, ...]


_replaced: dict[str, Replaced] = {}  # by `Replaced.theirs`


def check_version(where: str, package: str, expected: str) -> None:
    """Raises: RuntimeError if ``package`` is not installed in version ``expected``."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = None
    if found != expected:
        state = "not installed" if found is None else f"installed in version {found}"
        raise RuntimeError(
            f"{where}: {package} is {state}, expected {expected}. "
            f"Run: pip install {package}=={expected}"
        )


def replace(theirs: str, ours: Callable[..., Any]) -> Replaced:
    """Make callers of ``theirs`` call ``ours(original, *args, **kwargs)``.

    Every loaded module of their package that imported the function by name gets the replacement;
    modules that are loaded later import it from where it is defined. The second time does no more
    than to look for holders. A replacement has the name and signature of the original, which is
    its ``__wrapped__``.

    Args:
        theirs: "module:name" or "module:Class.name"; the module is imported.

    Raises: RuntimeError if there is no such function.
    """
    module_name, _, path = theirs.partition(":")
    *outer, name = path.split(".")
    try:
        owner = reduce(getattr, outer, import_module(module_name))
        held: Any = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"integrations: {theirs} is not there ({error}), expected a function to replace. "
            "Install the version that the integration names"
        ) from error
    original: Any = held.__wrapped__ if hasattr(held, OURS) else held

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(replacement, OURS, f"{ours.__module__}.{ours.__qualname__}")
    found = _put(theirs, owner, name, original, held if hasattr(held, OURS) else replacement)
    _replaced[theirs] = found
    return found


def replace_all(
    where: str, package: str, expected: str, pieces: Mapping[str, Callable[..., Any]]
) -> list[Replaced]:
    """`replace` each of ``pieces``, by "module:name"; the second time changes nothing.

    Raises: RuntimeError if ``package`` is not installed in version ``expected``.
    """
    check_version(where, package, expected)
    for theirs, ours in pieces.items():
        replace(theirs, ours)
    # their modules are loaded now, so that all holders are found
    return [replace(theirs, ours) for theirs, ours in pieces.items()]


def restore(theirs: str) -> None:
    """Undo `replace` in every module."""
    module_name, _, path = theirs.partition(":")
    *outer, name = path.split(".")
    owner = reduce(getattr, outer, import_module(module_name))
    held: Any = getattr(owner, name)
    if hasattr(held, OURS):
        _put(theirs, owner, name, held, held.__wrapped__)
    _replaced.pop(theirs, None)


def uninstall() -> None:
    """Undo every replacement in this process."""
    for theirs in list(_replaced):
        restore(theirs)


def report() -> str:
    """A line for each function that is replaced in this process, with the modules that hold it."""
    lines = [f"{x.theirs} -> {x.ours}, in {', '.join(x.holders)}" for x in _replaced.values()]
    return "\n".join(lines) or "integrations: nothing is replaced"


def _put(theirs: str, owner: Any, name: str, old: Any, new: Any) -> Replaced:
    """Set ``new`` in ``owner``, and wherever a module of its package holds ``old``."""
    setattr(owner, name, new)
    if isinstance(owner, ModuleType):
        package = theirs.partition(":")[0].partition(".")[0]
        loaded = [m for n, m in list(sys.modules.items()) if f"{n}.".startswith(f"{package}.")]
        for module in loaded:
            for alias in [key for key, value in vars(module).items() if value is old]:
                setattr(module, alias, new)
        holders = [m.__name__ for m in loaded if any(x is new for x in vars(m).values())]
    else:
        holders = [f"{owner.__module__}.{owner.__qualname__}"]
    return Replaced(theirs, getattr(new, OURS, theirs), tuple(sorted(holders)))
