"""Environments of the package verifiers: which module a name stands for, without running it."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.language.paths import relative
from pyrl_ext.plan.schema.turns import VERIFIERS
from pyrl_ext.plan.user_code import find_module

INSTALL = "pip install 'pyrl-ext[verifiers]'"
MOST_TASKS = 4096
"""Tasks of a taskset without end that are used, the first ones."""


def taskset_problem(name: str, folder: str) -> str | None:
    """Why there is no taskset ``name``; None: there is, or only running its module tells.

    Args:
        folder: searched for modules after sys.path; that of the YAML file
    """
    package = find_spec("verifiers")
    if package is None:
        return f"{VERIFIERS}{name} without the package verifiers, expected it. Run {INSTALL}"
    folders = [
        str(Path(place) / "v1/tasksets") for place in package.submodule_search_locations or ()
    ]
    module = taskset_module(name)
    if not module.isidentifier():
        return f"{show(VERIFIERS + name)}, expected {VERIFIERS}NAME, where NAME is a module"
    if PathFinder.find_spec(module, folders) is not None:
        return None
    if not isinstance(find_module(module, folder), str):
        return None
    shipped = ", ".join(each.name for each in iter_modules(folders))
    return (
        f"{VERIFIERS}{name}: no module {module!r}, expected one of those that verifiers brings "
        f"({shipped}), one that is installed, or one next to the YAML file ({relative(folder)})"
    )


def taskset_module(name: str) -> str:
    """The module of a taskset, as verifiers finds it: of ``owner/my-name@1`` it is my_name."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
