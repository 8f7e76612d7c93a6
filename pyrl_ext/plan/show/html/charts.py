"""Pictures of a page: stacked bars, drawn by its style sheet, with widths in percent of the widest
bar; and the curve of the learning rate, in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyrl_ext.plan.forecast.memory import StageMemory
from pyrl_ext.plan.forecast.step_time import StepTime
from pyrl_ext.plan.model.units import duration, scientific, size
from pyrl_ext.schedule.learning_rate import LearningRate

SERIES = 16
"""Colours of a chart; more parts repeat them."""


class RowPart(NamedTuple):
    """A piece of a bar."""

    name: str
    colour: int
    """Of `SERIES`."""
    width: float
    text: str


class ChartRow(NamedTuple):
    """A row of the chart: its label, its parts, and their total in words."""

    label: str
    parts: list[RowPart]
    total: str


def memory_bars(stages: Sequence[StageMemory], limit: int | None) -> list[ChartRow]:
    """Device memory of each stage by phase, and the limit."""
    most = max(limit or 0, *(stage.peak for stage in stages)) or 1
    names = list(dict.fromkeys(item.name for stage in stages for item in stage.items))
    bars = []
    for stage in stages:
        for phase in stage.phases:
            parts = [
                RowPart(i.name, names.index(i.name) % SERIES, 100 * i.bytes / most, size(i.bytes))
                for i in stage.items
                if phase in i.phases and not i.host
            ]
            label = phase if len(stages) == 1 else f"{stage.name}, {phase}"
            bars.append(ChartRow(label, parts, size(stage.held(phase))))
    if limit is not None:
        bars.append(
            ChartRow("limit", [RowPart("limit", 9, 100 * limit / most, size(limit))], size(limit))
        )
    return bars


def time_bars(time: StepTime) -> list[ChartRow]:
    """Seconds of a step by phase."""
    most = max(map(time.seconds, time.phases))
    names = list(dict.fromkeys(cost.name for cost in time.costs))
    return [
        ChartRow(
            phase,
            [
                RowPart(
                    c.name,
                    names.index(c.name) % SERIES,
                    100 * c.seconds / most,
                    duration(c.seconds),
                )
                for c in time.costs
                if c.phase == phase
            ],
            duration(time.seconds(phase)),
        )
        for phase in time.phases
    ]


class CurveMark(NamedTuple):
    """A point of a curve with a label above it, in pixels."""

    x: float
    y: float
    label_y: float
    anchor: str
    """Side of the label that is at `x`: start or end."""
    text: str


class Curve(NamedTuple):
    """A line over the steps of a run, in pixels of a picture of `width` times `height`."""

    width: int
    height: int
    points: str
    """`x,y` of each, as SVG writes them."""
    marks: list[CurveMark]
    left: int
    right: int
    top: int
    bottom: int
    most: str
    """The value at `top`; at `bottom` it is 0."""
    steps: int
    """The step at `right`; at `left` it is 0."""


CURVE_POINTS = 200
"""Most points of a curve, without those that have a label."""


def rate_curve(rate: LearningRate) -> Curve | None:
    """The learning rate from the first optimizer step to what is reached after the last one, with
    the ends of warmup and decay; None: it is constant."""
    if rate.is_constant:
        return None
    left = 60
    right = 940
    top = 70
    bottom = 210
    labels = _rate_labels(rate)
    stride = -(-rate.steps // CURVE_POINTS)
    stable = max(0, rate.decay_begin - 1)  # the last step before the decay
    steps = sorted({*range(0, rate.steps, stride), *labels, stable, rate.steps})

    def x(step: int) -> float:
        return left + (right - left) * step / rate.steps

    def y(step: int) -> float:
        return bottom - (bottom - top) * rate(step) / rate.lr

    marks = []
    for number, (step, text) in enumerate(labels.items()):
        anchor = "start" if step < rate.steps / 2 else "end"
        marks.append(CurveMark(x(step), y(step), 16.0 + 18 * number, anchor, text))
    points = " ".join(f"{x(step):.2f},{y(step):.2f}" for step in steps)
    most = scientific(rate.lr)
    return Curve(1000, 240, points, marks, left, right, top, bottom, most, rate.steps)


def _rate_labels(rate: LearningRate) -> dict[int, str]:
    """0-based optimizer step -> what happens there; in the order in which no line from a label to
    the curve crosses the label of another."""
    labels: dict[int, str] = {}
    if rate.warmup_steps > 1:
        last = rate.warmup_steps - 1
        labels[last] = f"step {last}: warmup ends at {scientific(rate(last))}"
    if rate.schedule != "constant":
        labels[rate.steps] = f"step {rate.steps}: decay ends at {scientific(rate(rate.steps))}"
    if rate.schedule == "wsd":
        begin = rate.decay_begin
        labels[begin] = f"step {begin}: decay begins"
    return labels
