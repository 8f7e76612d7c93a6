"""Stacked bars of a page, drawn by its style sheet: widths in percent of the widest bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyrl_ext.plan.forecast.memory import StageMemory
from pyrl_ext.plan.forecast.step_time import StepTime
from pyrl_ext.plan.model.units import duration, size

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
