"""`plan --calibrate`: measured rates in place of assumed ones, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.hardware import GPUS
from pyrl_ext.plan.forecast.measured import (
    FORMAT,
    in_use,
    is_kind,
    read_report,
    using,
)
from pyrl_ext.plan.forecast.parts import REACHED, reached
from pyrl_ext.plan.forecast.step_time import step_time

GLM47 = Path(__file__).parents[2] / "configs" / "glm47.yaml"
ON_H100 = ("hardware.gpu=H100", "rollout.offload_trainer=all")
RATES = {
    "memory": (3e12, "byte"),
    "projections": (6e14, "FLOP"),
    "grouped experts": (5e14, "FLOP"),
    "product": (8e14, "FLOP"),  # the forecast assumes no such kind
}


def written(folder: Path, gpu: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> str:
    """A report with rates, as `benchmarks.gpu` writes it; ``changes`` of its numbers by kind."""
    links = [("host", 50e9, "byte"), ("host", 40e9, "byte")]
    found = [*((kind, *rate) for kind, rate in RATES.items()), *links]
    rows: list[dict[str, Any]] = []
    for kind, rate, unit in found:
        numbers = {"rate": rate, "unit": unit, "dtype": "bfloat16", "what": "so"}
        numbers |= changes.get(kind, {})
        rows.append({"name": kind, "state": "ok", "why": "", "numbers": numbers})
    rows.append({"name": "head", "state": "failed", "why": "no", "numbers": {}})
    results = [{"part": "tests", "rows": [{}]}, {"part": "rates", "rows": rows}]
    report = {"format": FORMAT, "facts": {"gpu": gpu}, "results": results}
    (folder / "report.json").write_text(json.dumps(report))
    return str(folder)


def test_read_report_takes_what_was_measured_and_the_slower_of_two(tmp_path: Path):
    found = read_report(written(tmp_path), "H100")
    assert {kind: rate.rate for kind, rate in found.rates.items()} == {
        **{kind: rate for kind, (rate, _) in RATES.items() if kind in REACHED},
        "host": 40e9,
    }
    assert found.device == "NVIDIA H100 80GB HBM3"
    assert found.source == str(tmp_path / "report.json")


def test_reached_takes_measured_rates_of_the_same_peak_only(tmp_path: Path):
    sheet = GPUS["H100"]
    with using(read_report(written(tmp_path), "H100")):
        assert reached("projections", sheet.flops["bfloat16"])[0] == 6e14
        assert reached("projections", sheet.flops["float32"])[0] == 0.6 * sheet.flops["float32"]
        assert reached("memory", sheet.bandwidth, "byte")[0] == 3e12
        assert reached("memory", GPUS["H200"].bandwidth, "byte")[0] == 0.8 * 4.8e12
        assert reached("attention", sheet.flops["bfloat16"])[0] == 0.4 * 989e12
        assert "measured on NVIDIA H100" in reached("host", sheet.host, "byte")[1]
    assert in_use() is None
    assert reached("projections", sheet.flops["bfloat16"])[0] == 0.6 * 989e12


def test_step_time_follows_measured_rates(tmp_path: Path):
    plan = compile_plan(GLM47, ON_H100)
    before = step_time(plan)
    with using(read_report(written(tmp_path), "H100")):
        after = step_time(plan)
    assert before and after
    for cost, other in zip(before.costs, after.costs, strict=True):
        assert (cost.phase, cost.name, cost.amount) == (other.phase, other.name, other.amount)
    seconds = {(c.phase, c.name): c for c in after.costs}
    experts = seconds["update", "experts"]
    head = seconds["update", "head"]
    assert experts.seconds == pytest.approx(experts.amount / 5e14)
    assert head.seconds == pytest.approx(head.amount / (0.4 * 989e12))
    text = " ".join(after.assumed)
    assert "projections 61% (assumed 60%)" in text and "grouped experts 51% (assumed 50%)" in text
    assert "assumed as before: attention, scan, head, fp8, ring, exchange" in text
    assert "measured" not in " ".join(before.assumed)
    assert before.error != after.error


@pytest.mark.parametrize(
    ("device", "gpu", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 PCIe", "H100", False),
        ("NVIDIA H100 NVL", "H100", False),
        ("NVIDIA H200", "H200", True),
        ("NVIDIA GH200 480GB", "H200", False),
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA A100-SXM4-80GB", "H100", False),
        ("none", "H100", False),
    ],
)
def test_is_kind_reads_the_name_of_a_device(device: str, gpu: str, same: bool):
    assert is_kind(device, gpu) is same


BROKEN = {
    "another GPU": ({"gpu": "NVIDIA H200"}, "measured on NVIDIA H200, expected H100"),
    "no GPU": ({"gpu": "none"}, "measured on none, expected H100"),
    "above the data sheet": (
        {"memory": {"rate": 4e12}},
        "rate of memory is 4000000000000.0 byte/s, expected above 0 and at most the data sheet's",
    ),
    "nothing": ({"memory": {"rate": 0}}, "rate of memory is 0 byte/s"),
    "NaN": ({"memory": {"rate": float("nan")}}, "rate of memory is nan"),
    "text": ({"memory": {"rate": "fast"}}, "rate of memory is fast"),
    "another unit": ({"memory": {"unit": "FLOP"}}, "is in FLOP, bfloat16, expected byte"),
    "another type": ({"projections": {"dtype": "float32"}}, "is in FLOP, float32, expected FLOP"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_read_report_refuses_what_was_not_measured_there(tmp_path: Path, name: str):
    changes, message = BROKEN[name]
    with pytest.raises(ConfigError) as error:
        read_report(written(tmp_path, **changes), "H100")
    assert message in str(error.value) and str(tmp_path / "report.json") in str(error.value)


FILES = {
    "no such file": (None, "No such file or directory, expected a report of make gpu"),
    "no JSON": ("{", "expected the JSON report of make gpu"),
    "another file": ('{"a": 1}', "format None, expected 'pyrl gpu report 1'"),
    "a list": ("[]", "format None, expected"),
    "no facts": (json.dumps({"format": FORMAT}), "format 'pyrl gpu report 1', expected"),
    "no rates": (
        json.dumps({"format": FORMAT, "facts": {"gpu": "NVIDIA H100"}, "results": []}),
        "no measured rate, expected those of the part rates",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_read_report_refuses_files_that_are_no_report(tmp_path: Path, name: str):
    text, message = FILES[name]
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_report(str(tmp_path / "report.json"), "H100")
    assert message in str(error.value)


def test_calibrate_shows_what_it_took_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report = written(tmp_path)
    assert main([str(GLM47), *ON_H100, "--calibrate", report]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured on NVIDIA H100 80GB HBM3, of the data sheet's rate: memory 90%" in shown
    assert in_use() is None
    assert main([str(GLM47), "--calibrate", report]) == 2
    assert "expected H200 as hardware.gpu" in capsys.readouterr().err
    assert main([str(GLM47.with_name("tiny.yaml")), "--calibrate", report]) == 2
    assert "hardware.gpu is null" in capsys.readouterr().err
    assert main([str(GLM47), "--suggest", "8xH200", "--calibrate", report]) == 2
    assert "expected H200 as hardware.gpu" in capsys.readouterr().err
    assert main([str(GLM47), "--suggest", "many", "--calibrate", report]) == 2
    assert "--suggest: 'many'" in capsys.readouterr().err
