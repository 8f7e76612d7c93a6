"""Metrics that were outside the bands of the glossary, and numbers that were not finite."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from pyrl_ext.metrics.glossary import described, lookup
from pyrl_ext.tools.report.curves import Columns


class Alarm(NamedTuple):
    """One metric of one run that was outside its band.

    Args:
        level: the worst that it reached.
        still: whether the last step that has the metric is outside, too.
        worst: the value farthest out, at step ``at``.
        outside, steps: how many steps were outside, of how many; from ``first`` to ``last``.
    """

    run: int
    name: str
    level: Literal["warn", "alarm"]
    still: bool
    worst: float
    at: int
    outside: int
    steps: int
    first: int
    last: int
    definition: str

    @property
    def band(self) -> tuple[float, float] | None:
        """Its (warn, alarm) levels."""
        metric = lookup(self.name)
        return metric and metric.band

    @property
    def words(self) -> str:
        """The alarm as a sentence without its name."""
        side = ""
        if self.band is not None and np.isfinite(self.worst):
            limit = self.band[self.level == "alarm"]
            side = (
                f" ({self.level} {'above' if self.band[1] > self.band[0] else 'below'} {limit:g})"
            )
        where = f"at step {self.first}"
        if self.outside > 1:
            where = f"in {self.outside:,} of {self.steps:,} steps, {self.first} to {self.last}"
        return f"{self.worst:.4g}{side} at step {self.at}; outside {where}"


def alarms(run: int, columns: Columns) -> list[Alarm]:
    """The alarms of one run: those of the last step first, then the worst, then the newest."""
    found = []
    for name, (steps, values) in columns.items():
        metric = described(name)
        broken = ~np.isfinite(values)
        if metric.band is None and not broken.any():
            continue
        levels = [metric.level(value) for value in values.tolist()]
        outside = np.array([level != "ok" for level in levels])
        if not outside.any():
            continue
        level = "alarm" if "alarm" in levels else "warn"
        rising = metric.band is None or metric.band[1] > metric.band[0]
        order = np.where(broken, np.inf, values if rising else -values)
        worst = int(order.argmax())
        places = np.flatnonzero(outside)
        found.append(
            Alarm(
                run=run,
                name=name,
                level=level,
                still=bool(outside[-1]),
                worst=float(values[worst]),
                at=int(steps[worst]),
                outside=len(places),
                steps=len(steps),
                first=int(steps[places[0]]),
                last=int(steps[places[-1]]),
                definition=metric.definition,
            )
        )
    return sorted(found, key=lambda a: (not a.still, a.level != "alarm", -a.last, a.name))
