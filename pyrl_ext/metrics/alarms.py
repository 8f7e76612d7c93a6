"""Alarms: metrics that are outside their band in the glossary, or not finite.

Of a step in plain words, for the terminal; of a run with their steps, for its report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyrl_ext.metrics.glossary import described
from pyrl_ext.metrics.history import Columns
from pyrl_ext.metrics.sinks import Row

# level -> how a terminal shows it
MARKS = {"alarm": "!", "warn": "~"}
COLORS = {"alarm": "red", "warn": "yellow"}


def alarming(row: Row) -> list[str]:
    """Names of a step's metrics whose level is "alarm", in the order of the row."""
    return [name for name, value in row.items() if described(name).level(value) == "alarm"]


def problems(row: Row) -> list[str]:
    """What is alarming in a step, in plain words ("100 % truncated"), each problem once."""
    names = alarming(row)
    broken = [name for name in names if not math.isfinite(row[name])]
    found = [_problem(name, row[name]) for name in names if name not in broken]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        found.insert(0, f"{broken[0]} is {row[broken[0]]}{more}")
    return list(dict.fromkeys(found))


def _problem(name: str, value: float) -> str:
    return described(name).problem.format(value=f"{value:.3g}", share=f"{100 * value:.3g} %")


@dataclass(frozen=True)
class Alarm:
    """A metric that was outside its band, or not finite.

    Args:
        level: the worst that it reached, "warn" or "alarm".
        still: True if it is outside in the last step, too.
        steps: number of steps at that level.
        last: last step at that level.
        problem: its worst value in plain words, such as "100 % truncated".
        kind: equal for metrics that tell of the same problem.
        words: the alarm as a sentence without the name.
    """

    name: str
    level: str
    still: bool
    steps: int
    last: int
    problem: str
    kind: str
    words: str
    definition: str


def alarms(columns: Columns) -> list[Alarm]:
    """Alarms of one run: those of the last step first, then the worst, then the newest."""
    found: list[Alarm] = []
    for name, (steps, values) in columns.items():
        alarm = _alarm(name, steps, values)
        if alarm is not None:
            found.append(alarm)
    return sorted(found, key=lambda a: (not a.still, a.level, -a.last, a.name))


def worst_of(found: Sequence[Alarm]) -> list[Alarm]:
    """One alarm for each kind of problem, the worst first: by level, then by number of steps."""
    kinds: dict[str, Alarm] = {}
    for alarm in sorted(found, key=lambda a: (a.level, -a.steps)):
        kinds.setdefault(alarm.kind, alarm)
    return list(kinds.values())


def _alarm(name: str, steps: np.ndarray, values: np.ndarray) -> Alarm | None:
    metric = described(name)
    levels = [metric.level(value) for value in values.tolist()]
    level = next((level for level in ("alarm", "warn") if level in levels), None)
    if level is None:
        return None
    outside = np.flatnonzero([each == level for each in levels])
    rising = metric.band is None or metric.band[1] > metric.band[0]
    size = np.where(np.isfinite(values), values if rising else -values, np.inf)
    worst = int(size.argmax())
    limit = ""
    problem = kind = "not finite"
    if metric.band is not None and np.isfinite(values[worst]):
        side = "above" if rising else "below"
        limit = f" ({level} {side} {metric.band[level == 'alarm']:g})"
        kind = metric.problem
        problem = _problem(name, float(values[worst]))
    first = int(steps[outside[0]])
    last = int(steps[outside[-1]])
    where = f"at step {first}"
    if len(outside) > 1:
        where = f"in {len(outside):,} of {len(steps):,} steps, {first} to {last}"
    return Alarm(
        name=name,
        level=level,
        still=levels[-1] != "ok",
        steps=len(outside),
        last=last,
        problem=problem,
        kind=kind,
        words=f"{values[worst]:.4g}{limit} at step {steps[worst]}; outside {where}",
        definition=metric.definition,
    )
