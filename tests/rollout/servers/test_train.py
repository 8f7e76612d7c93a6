"""Runs over servers of the embedded engine: equal to the engine beside the trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.helpers.ranks import run_ranks
from tests.helpers.server_processes import server_processes
from tests.helpers.server_runs import COMMON, assert_same, over, rows_of, run


def on_rank(_group: Any, folder: Path, *overrides: str) -> None:
    os.environ["WORLD_SIZE"] = "2"
    assert run(folder, *overrides)[0] == 0


def test_train_over_servers_equals_the_engine_beside_the_trainer(tmp_path: Path):
    assert run(tmp_path / "beside")[0] == 0
    with server_processes(tmp_path, 2, COMMON) as servers:
        assert run(tmp_path / "apart", over(servers))[0] == 0
        run_ranks(on_rank, 2, tmp_path / "two", "parallel.dp=2", over(servers))
    assert_same(tmp_path / "apart", tmp_path / "beside")
    assert_same(tmp_path / "two", tmp_path / "beside")
    for row in [*rows_of(tmp_path / "apart")[:-1], *rows_of(tmp_path / "two")[:-1]]:
        assert row["servers/used"] == 2 and row["servers/resent"] == 0
        assert row["mismatch/max"] < 1e-5 and row["publish/checked"] > 0
        ends = ("returned", "aborted", "failed", "in_flight")
        assert row["servers/prompts_asked"] == sum(row[f"servers/prompts_{end}"] for end in ends)
