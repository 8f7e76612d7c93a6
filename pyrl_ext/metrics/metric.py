"""One metric: its unit, its formula, and the values that are alarming."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: as in metrics.jsonl; ``<id>`` and ``<name>`` stand for a number and a name.
        unit: of the value; "1" is a ratio or a fraction.
        definition: one sentence with the formula.
        band: (warn, alarm) levels, rising if large values are bad, falling if small ones are;
            None if no value is bad in itself.
        source: where the formula or the band comes from; empty if it is our own.
        phase: of a phase's time, whether it goes into the model (any trainer spends it) or into our
            own code; empty for everything else.
        problem: what an alarming value means, in plain words; ``{value}`` and ``{share}`` stand for
            the value and for it in percent. Metrics with the same words tell of one problem.
    """

    name: str
    unit: str
    definition: str
    band: tuple[float, float] | None = None
    source: str = ""
    phase: Literal["", "model", "ours"] = ""
    problem: str = ""

    def level(self, value: float) -> str:
        """ "ok", "warn" or "alarm"; a number that is not finite is an alarm, band or not."""
        if not math.isfinite(value):
            return "alarm"
        if self.band is None:
            return "ok"
        warn, alarm = self.band
        sign = 1 if alarm > warn else -1
        if sign * (value - alarm) > 0:
            return "alarm"
        if sign * (value - warn) > 0:
            return "warn"
        return "ok"
