"""Runs with the packages alone that pyproject.toml brings: ``python -m tests.helpers.declared``.

An environment has more: what the extras bring, and what tests use. A module that imports one of
those runs there, and fails in the environment of who installs the package and nothing else.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageNotFoundError,
    packages_distributions,
    requires,
)
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]


class DeclaredFinder:
    """The import system's finder of installed modules, which does not find those in ``hidden``.

    Nor does it find the versions of other distributions than ``brought``: megatron-core imports a
    package if it has a version.
    """

    def __init__(self, hidden: Iterable[str], brought: Iterable[str]):
        self.hidden = frozenset(hidden)
        self.brought = frozenset(brought)
        self.invalidate_caches = PathFinder.invalidate_caches

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> list[Distribution]:
        found = PathFinder.find_distributions(context or DistributionFinder.Context())
        return [each for each in found if canonicalize_name(each.name) in self.brought]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self.hidden:
            return None
        return PathFinder.find_spec(name, path, target)


def brought_by(requirements: Iterable[str]) -> set[str]:
    """Names of the distributions that pip installs for ``requirements``, of what is here."""
    left = [Requirement(each) for each in requirements]
    seen = set[tuple[str, str]]()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                left += _requirements(name, extra)
    return {name for name, _ in seen}


def _requirements(name: str, extra: str) -> list[Requirement]:
    """Return what an installed distribution requires with ``extra``; nothing if it is not here."""
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]


def undeclared(requirements: Iterable[str]) -> set[str]:
    """Names of the installed modules that none of ``requirements`` brings."""
    brought = brought_by(requirements)
    return {
        module
        for module, distributions in packages_distributions().items()
        if brought.isdisjoint(canonicalize_name(each) for each in distributions)
    }


def declared(*extras: str) -> list[str]:
    """Requirements of the package with ``extras``, from pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    found = [*project["dependencies"], project["name"]]
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


def hide_undeclared(*extras: str) -> set[str]:
    """From here on this process finds no module that the package with ``extras`` does not bring.

    Returns: the names of those that are installed.
    """
    requirements = declared(*extras)
    hidden = undeclared(requirements)
    place = sys.meta_path.index(PathFinder)
    finder = DeclaredFinder(hidden, brought_by(requirements))
    sys.meta_path[place] = finder  # type: ignore[call-overload]
    return hidden


def main(configs: Sequence[str]) -> int:
    """One short step of every config; the exit code of the first that fails."""
    print("hidden:", *sorted(hide_undeclared("train")))
    from pyrl_ext.train import main as train
    from tests.helpers.tiny import QUICK

    for config in configs:
        name = Path(config).stem
        code = train([config, *QUICK, "steps=1", "evaluate.every=0", f"run=runs/{name}"])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
