"""The benchmark next to other trainers: right without them, and it refuses wrong results."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import cases_integrations as cases
from benchmarks.dynamic_cp import DISTRIBUTIONS
from benchmarks.integrations import lines, measured, rows_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess


def _quick(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    return rows_of(group, quick=True)


def test_integrations_quick_measures_ours_where_no_trainer_is_installed(monkeypatch):
    first, second = run_ranks(_quick, 2)
    assert [row["name"].split(",")[0] for row in first] == [
        *["log-probs"] * 2,
        "packing",
        *["replay"] * 2,
        *["balance"] * 16,
    ]
    assert [row["name"] for row in second] == [row["name"] for row in first[:2]]
    results = [row["codes"]["ours"][0] for row in first]
    assert results[2] == "equal"
    assert results[3].startswith("0 of ") and results[3] == results[4] != "0 of 0"
    monkeypatch.setattr(cases, "find_spec", lambda name: None)
    shown = [*lines(first[2], cases.missing())]
    assert [line[1:3] for line in shown[:-1]] == [
        ["ours", "equal"],
        ["verl", "verl is not installed: make .venv/verl"],
        ["SkyRL", "skyrl is not installed: make .venv/skyrl"],
    ]


def test_measured_refuses_wrong_results():
    packing = cases.packing(shrink=64)
    zeros = [torch.zeros_like(column) for column in packing.runs["ours"]()]
    with pytest.raises(ValueError, match=r"packing, .*: verl is wrong, expected the rows"):
        measured(packing._replace(runs=packing.runs | {"verl": lambda: zeros}), 1)
    balance = cases.balance(DISTRIBUTIONS[0], 512, 8, 64)
    plan = balance.runs["ours"]()
    with pytest.raises(ValueError, match="SkyRL is wrong, expected every sample once"):
        measured(balance._replace(runs=balance.runs | {"SkyRL": lambda: plan[1:]}), 1)


def test_lines_mark_what_ours_loses():
    row = {"name": "work", "codes": {"ours": ("equal", 2.0, 0.0), "verl": ("equal", 1.0, 3.0)}}
    assert [*lines(row, {})] == [
        ["work", "ours", "equal", "2", "", "0", ""],
        ["", "verl", "equal", "1", " 0.5x*", "3", ""],
        [],
    ]
