"""Packages whose names are imported when they are first asked for.

``from pyrl_ext import loss`` then costs nothing, and a name that needs an optional package can be
exported next to names that need torch alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

INSTALL = "pip install 'pyrl-ext[train]'"


def exported(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``.

    Args:
        homes: name -> the module of ``package`` that defines it. A name that is its home is that
            module.

    The function raises ModuleNotFoundError, naming what to install, where a module imports a
    package that is missing.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{package}.{homes[name]}")
        except ModuleNotFoundError as error:
            raise missing(f"{package}.{name}", error) from None
        found = home if homes[name] == name else getattr(home, name)
        setattr(sys.modules[package], name, found)
        return found

    return find


def missing(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a user of ``what``; the same one where the missing module is of pyrl_ext."""
    needed = (error.name or "").partition(".")[0]
    if needed == "pyrl_ext":
        return error
    return ModuleNotFoundError(
        f"{what} needs the package {needed}, which is not installed. Run: {INSTALL}", name=needed
    )
