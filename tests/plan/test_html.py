"""The plan's page: well-formed, escaped, complete, the same for the same plan."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.show.html.charts import memory_bars, rate_curve, time_bars
from pyrl_ext.plan.show.html.page import plan_page, problems_page
from pyrl_ext.plan.show.summary import Summary, facts, values
from pyrl_ext.schedule.learning_rate import LearningRate
from tests.helpers.plan_pages import GLM47, PLANS, checked, plan_of, words_of

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("name", ["tiny", "interleaved"])
def test_plan_page_loads_nothing_and_is_well_formed(name: str):
    page = plan_page(plan_of(name))
    assert page.startswith("<!DOCTYPE html>") and len(page) < 200_000
    elements = checked(page).elements
    assert not {tag for tag, _ in elements} & {"link", "img", "iframe", "object", "embed", "script"}
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in elements)
    assert not re.search(r"https?:|@import|url\(", page)


def test_plan_page_escapes_texts_of_the_config():
    page = plan_page(plan_of("tiny", "run='</td><script>x&y</script>'"))
    assert "</td><script>x&y</script>" in checked(page).words and "<script>" not in page


def test_plan_page_has_every_note_changed_value_and_number():
    plan = plan_of("glm47")
    summary = Summary(plan)
    words = words_of(plan_page(plan))
    assert all(remark in words for remark in (*plan.notes, *plan.unsupported))
    assert all(value.is_default or value.text in words for value in values(plan))
    for table in summary.tables():
        for row in table.rows:
            assert all(" ".join(cell.split()) in words for cell in row)


CONSTANT = LearningRate(0.1, 0.0, "constant", 0, 0, 10)
SCHEDULES = {
    "cosine": (
        ("optimizer.schedule=cosine", "optimizer.warmup_steps=10"),
        "0.003, warmup 10 steps, cosine to 1e-5 at optimizer step 600",
        ["step 9: warmup ends at 0.003", "step 600: decay ends at 1e-5"],
    ),
    "linear": (
        ("optimizer.schedule=linear",),
        "0.003, linear to 1e-5 at optimizer step 600",
        ["step 600: decay ends at 1e-5"],
    ),
    "wsd": (
        ("optimizer.schedule=wsd", "optimizer.warmup_steps=50", "optimizer.decay_steps=90"),
        "0.003, warmup 50 steps, linear from step 510 to 1e-5 at optimizer step 600",
        ["step 49: warmup ends at 0.003", "step 600: decay ends at 1e-5", "step 510: decay begins"],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_plan_page_draws_the_learning_rate_of_every_step_it_has_a_point_for(name: str):
    overrides, sentence, labels = SCHEDULES[name]
    plan = plan_of("tiny", *overrides, "optimizer.min_lr=1e-5")
    rate = plan.learning_rate()
    page = checked(plan_page(plan))
    assert sentence in page.words and dict(facts(plan))["lr"] == sentence
    assert [word for word in page.words if ": warmup" in word or ": decay" in word] == labels
    (line,) = [attributes["points"] for tag, attributes in page.elements if tag == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in str(line).split()]
    curve = rate_curve(rate)
    assert curve is not None and len(points) > 100
    width = curve.right - curve.left
    height = curve.bottom - curve.top
    for x, y in points:
        step = round((x - curve.left) / width * rate.steps)
        assert (curve.bottom - y) / height == pytest.approx(rate(step) / rate.lr, abs=1e-4)
    assert points[0][0] == curve.left and points[-1][0] == curve.right
    for mark in curve.marks:
        assert (round(mark.x, 2), round(mark.y, 2)) in points


def test_plan_page_draws_no_constant_learning_rate():
    plan = plan_of("tiny")
    assert "<svg" not in plan_page(plan) and "lr" not in dict(facts(plan))
    warm = plan_of("tiny", "optimizer.warmup_steps=20")
    assert "step 19: warmup ends at 0.003" in checked(plan_page(warm)).words
    assert dict(facts(warm))["lr"] == "0.003, warmup 20 steps"
    for flat in ({"warmup_steps": 1}, {"schedule": "cosine", "min_lr": 0.1}, {"lr": 0.0}):
        rate = replace(CONSTANT, **flat)
        assert rate.is_constant and rate_curve(rate) is None


def test_problems_page_has_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "plan.html"
    overrides = ["parallel.pp=3", "stepss=3", "run=<b>"]
    assert main([GLM47, *overrides, "--html", str(path)]) == 2
    with pytest.raises(ConfigError) as caught:
        compile_plan(GLM47, overrides)
    assert capsys.readouterr().err.splitlines() == str(caught.value).splitlines()
    assert path.read_text() == problems_page(caught.value)
    words = checked(path.read_text()).words
    for problem in caught.value.problems:
        assert problem.where in words and problem.message in words


def test_write_page_writes_the_same_bytes_for_the_same_plan(tmp_path: Path):
    pages = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.html"
        command = [sys.executable, "-m", "pyrl_ext.plan", *PLANS["interleaved"], "--html", path]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        run = subprocess.run(command, env=environment, capture_output=True)
        assert run.returncode == 0, run.stderr
        pages.append(path.read_bytes())
    assert pages[0] == pages[1]


def test_main_reports_a_page_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "none" / "plan.html"
    assert main([PLANS["tiny"][0], "--html", str(path)]) == 2
    expected = "No such file or directory, expected a file that can be written"
    assert capsys.readouterr().err == f"command line: --html {path}: {expected}\n"


def test_bars_are_as_wide_as_their_numbers():
    plan = plan_of("glm47")
    summary = Summary(plan)
    assert summary.limit is not None and summary.time is not None
    (stage,) = stage_memory(plan)
    bars = memory_bars(summary.memory, summary.limit)
    assert [bar.label for bar in bars] == [*stage.phases, "limit"]
    for bar in bars[:-1]:
        width = sum(part.width for part in bar.parts)
        assert width == pytest.approx(100 * stage.held(bar.label) / summary.limit)
    longest = max(map(summary.time.seconds, summary.time.phases))
    for bar in time_bars(summary.time):
        width = sum(part.width for part in bar.parts)
        assert width == pytest.approx(100 * summary.time.seconds(bar.label) / longest)
