"""A run follows no links that somebody else put into its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyrl_ext.metrics.history import load_run
from pyrl_ext.metrics.plot import plot
from pyrl_ext.metrics.sinks import JsonlSink
from pyrl_ext.parallel.atomic_write import locked
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.process.client import ProcessEngine
from pyrl_ext.train.serve import Watched

pytestmark = pytest.mark.multiprocess

VICTIM = '{"step": 0, "reward": 1.0, "seconds": 1.0}\n'


def lock(folder: Path) -> None:
    with locked(folder, is_main=True):
        pass


def no_engine() -> Engine:
    raise AssertionError("expected no process")


def start_engine(folder: Path) -> None:
    ProcessEngine(no_engine, (), transport="shm", log=folder / "engine-0.log")


def start_server(folder: Path) -> None:
    command: Any = SimpleNamespace(arguments=["true"], environment={})
    Watched(command, folder / "engine-1.log")


CALLS: dict[str, Callable[[Path], object]] = {
    "lock": lock,
    "metrics.jsonl": lambda folder: JsonlSink(folder / "metrics.jsonl"),
    "engine-0.log": start_engine,
    "engine-1.log": start_server,
}


@pytest.mark.parametrize("name", CALLS)
def test_files_that_a_run_appends_to_are_no_links(tmp_path: Path, name: str):
    victim = tmp_path / "victim"
    victim.write_text(VICTIM)
    (folder := tmp_path / "run").mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(OSError, match="a symbolic link, expected a file"):
        CALLS[name](folder)
    assert victim.read_text() == VICTIM


def test_plot_replaces_a_link(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(VICTIM)
    victim = tmp_path / "victim"
    victim.write_text(VICTIM)
    picture = tmp_path / "report.png"
    picture.symlink_to(victim)
    (tmp_path / f".report.png.{os.getpid()}.partial").symlink_to(victim)  # it can be guessed
    plot([load_run(tmp_path)], picture)
    assert victim.read_text() == VICTIM
    assert not picture.is_symlink() and picture.read_bytes().startswith(b"\x89PNG")
