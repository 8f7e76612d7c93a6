"""The command that holds the simulator of engines apart against a measured run."""

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
    steps = []
    for ahead in (0, 1, 2):
        loop = Loop(2, 4, lambda k: TOKEN, lambda n: 0.0, 0.9, 0.1, lambda step: groups, 6, ahead,
                    "abort", 0.05)  # fmt: skip
        steps.append(
            {"ahead": ahead, "seconds": simulate(loop).seconds, "train": 0.9, "publish": 0.1}
        )
    return {"engines": 2, "slots": 4, "keep": 6, "latency": 0.05, "groups": group, "steps": steps}


def test_compare_fits_the_token_and_predicts_the_rest(report: dict[str, Any]):
    token, found = compare(Report.model_validate_json(json.dumps(report)))
    assert token == pytest.approx(TOKEN, rel=1e-6)
    assert [each.ahead for each in found] == [0, 1, 2]
    assert all(abs(each.error) < 1e-6 for each in found)
    assert found[1].measured < 0.8 * found[0].measured


def test_main_fails_beyond_the_bar(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert main([str(path)]) == 0
    assert "12.3 ms a token" in capsys.readouterr().out
    slower = [each | {"seconds": each["seconds"] * (1 + 1.3 * BAR * (each["ahead"] == 2))}
              for each in report["steps"]]  # fmt: skip
    path.write_text(json.dumps(report | {"steps": slower}))
    assert main([str(path)]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engines": 0}, "engines"),
        (
            {"steps": [{"ahead": 1, "seconds": 1, "train": 0.1, "publish": 0}]},
            "expected one with 0",
        ),
        ({"steps": [{"ahead": 0, "seconds": 1, "train": 1, "publish": 0.5}]}, "expected above 0"),
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
