"""Runs over servers, and how equal they are."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext import train
from tests.helpers.rows import rows_of
from tests.helpers.server_processes import ServerProcess
from tests.helpers.tiny import CONFIG, QUICK

# longer responses: a server dies while it generates
COMMON = (
    *(each for each in QUICK if "max_new_tokens" not in each),
    "rollout.max_new_tokens=24",
    "steps=3",
    "evaluate.every=2",
    "checkpoint.every=0",
)


def run(folder: Path, *overrides: str, config: Path = CONFIG) -> tuple[int, str]:
    """Exit code of the command in this process, and what it printed to stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = train.main([str(config), f"run={folder}", *COMMON, *overrides])
    return code, said.getvalue()


def over(servers: list[ServerProcess]) -> str:
    return f"rollout.servers={[each.address for each in servers]}"


SAME = ("reward", "loss", "grad_norm", "policy/", "mismatch/", "route/", "rollout/", "eval")


def assert_same(folder: Path, other: Path) -> None:
    """The same samples, and numbers equal up to the rounding of batches of other sizes."""
    rows = rows_of(folder)
    others = rows_of(other)
    assert len(rows) == len(others) == 4  # the last one is of the last evaluation
    for row, expected in zip(rows, others, strict=True):
        assert_same_row(row, expected)


def assert_same_row(row: dict[str, Any], expected: dict[str, Any]) -> None:
    """One step of `assert_same`."""
    names = {name for name in expected if name.startswith(SAME)}
    assert {name for name in row if name.startswith(SAME)} == names
    for name in names:
        near = pytest.approx(expected[name], rel=1e-3, abs=1e-5)
        assert row[name] == near, (name, row["step"])
    assert row.get("reward") == expected.get("reward")
    assert row.get("rollout/tokens") == expected.get("rollout/tokens")
