"""Time in the plan's tables and on its page: the schedule as it runs, seconds of a step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pyrl_ext.plan.forecast.units import amount, duration
from pyrl_ext.plan.show.summary import Summary
from tests.plan.test_html import REPOSITORY, checked, page_of, plan_of, printed, titled


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)


def test_schedule_is_drawn_as_it_runs():
    svg = titled(page_of("interleaved"), "Pipeline schedule")
    by_stage: dict[float, list[tuple[float, float]]] = {}
    for rect in svg.iterfind("g/rect"):
        left, width = float(rect.get("x", "")), float(rect.get("width", ""))
        by_stage.setdefault(float(rect.get("y", "")), []).append((left, left + width))
    assert len(by_stage) == 4
    for slots in by_stage.values():
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(sorted(slots)))
    forward = sum(each.get("class", "").startswith("forward") for each in svg.iterfind("g/rect"))
    assert forward * 2 == len(svg.findall("g/rect")) and forward % (4 * 2) == 0


def test_no_gpu_no_time():
    assert Summary(plan_of("tiny")).time is None
    (verdict,) = [each for each in Summary(plan_of("tiny")).verdicts if each.answer == "time"]
    assert verdict.detail == "not estimated: hardware.gpu names no GPU"


def test_every_second_is_on_the_page_and_in_the_terminal():
    plan = plan_of("glm47")
    time = Summary(plan).time
    assert time is not None
    svg = titled(page_of("glm47"), "Seconds of a step")
    widths = [float(rect.get("width", "")) for rect in svg.iterfind("g/rect")]
    seconds = [cost.seconds for cost in time.costs]
    scale = max(widths) / max(seconds)
    drawn = sorted(max(0.1, each * scale) for each in seconds)
    assert sorted(widths) == pytest.approx(drawn, abs=0.02)
    shown = "\n".join(printed(plan, 100))
    words = " ".join("".join(checked(page_of("glm47")).words).split())
    assert all(sentence in words for sentence in (*time.assumed, time.error))
    for cost in time.costs:
        assert f"  {cost.name}" in shown and duration(time.seconds(cost.phase)) in shown


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0123, "12.3 ms"), (1.1, "1.1 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_durations(seconds: float, expected: str):
    assert duration(seconds) == expected
    assert amount(3.2e12, "byte") == "3.2 TB" and amount(2e15, "FLOP") == "2 PFLOP"
    assert amount(48128, "layer") == "48,128 layer"
