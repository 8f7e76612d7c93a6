"""The command that holds the simulator of remote engines against a measured run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ahead_forecast import BAR, Report, compare, main
from pyrl_ext.plan.forecast.ahead import simulate
from pyrl_ext.plan.forecast.loop import Loop, Trajectory

TOKEN = 0.0123


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """A run that takes as long as the simulator says, with 12.3 ms a token."""
    draw = random.Random(0)
    group = [[(5, [draw.randint(2, 20), draw.randint(2, 20)]) for _ in range(4)] for _ in range(6)]
    groups = [tuple(Trajectory(prompt, tuple(turns)) for prompt, turns in each) for each in group]
    turns = [tokens for each in group for _, turns in each for tokens in turns]
    steps = []
    for ahead in (0, 1, 2):
        loop = Loop(2, 4, lambda k: TOKEN, lambda n: 0.0, 0.9, 0.1, lambda step: groups, 6, ahead,
                    "abort", 0.05, gather=0.04 if ahead else None, beside=0.3)  # fmt: skip
        parts = {"train": 0.9, "publish": 0.1, "gather": 0.04, "beside": 0.3}
        request = TOKEN * sum(turns) / len(turns)
        seconds = simulate(loop).seconds
        steps.append({"ahead": ahead, "seconds": seconds, "request": request} | parts)
    return {"engines": 2, "slots": 4, "keep": 6, "latency": 0.05, "groups": group, "steps": steps}


def test_compare_predicts_every_step(report: dict[str, Any]):
    found = compare(Report.model_validate_json(json.dumps(report)))
    assert [each.ahead for each in found] == [0, 1, 2]
    assert all(abs(each.error) < 1e-6 for each in found)
    assert found[1].measured < 0.8 * found[0].measured


def test_main_fails_beyond_the_bar(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert main([str(path)]) == 0
    assert "+0.0%" in capsys.readouterr().out
    slower = [each | {"seconds": each["seconds"] * (1 + 1.3 * BAR * (each["ahead"] == 2))}
              for each in report["steps"]]  # fmt: skip
    path.write_text(json.dumps(report | {"steps": slower}))
    assert main([str(path)]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engines": 0}, "engines"),
        ({"steps": [{"ahead": 1, "seconds": 1, "train": 0.1, "publish": 0}]}, "request"),
        ({"steps": []}, "steps"),
        ({"groups": []}, "groups"),
    ],
)
def test_main_refuses_what_is_no_report(
    change: dict[str, Any],
    message: str,
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report | change))
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err
    path.write_text("no JSON")
    assert main([str(path)]) == 2
