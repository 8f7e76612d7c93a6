"""Seconds of a step by phase, and memory, next to the plan's estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyrl_ext.metrics.glossary import GLOSSARY, lookup
from pyrl_ext.metrics.report import PHASES, phase_seconds
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.forecast.units import duration, size
from pyrl_ext.tools.report.state import Folder


class Bar(NamedTuple):
    """One bar: a run's, or its plan's estimate; ``width`` in percent of the longest."""

    run: int
    planned: bool
    width: float
    text: str


class Phase(NamedTuple):
    """The bars of one phase."""

    name: str
    words: str
    bars: list[Bar]


def phases(folders: Sequence[Folder]) -> tuple[list[Phase], list[str]]:
    """Mean seconds of a step by phase, and sentences about estimates."""
    found = []
    estimated = []
    remarks = []
    for folder in folders:
        steps = max(1, folder.step)
        found.append({name: s / steps for name, s in phase_seconds(folder.run).items()})
        time = step_time(folder.plan) if folder.plan else None
        names = [] if time is None else dict.fromkeys(cost.phase for cost in time.costs)
        estimated.append({f"time/{name}": time.seconds(name) for name in names} if time else {})
        if time is not None:
            remarks.append(f"{folder.run.name}: estimates were {time.error}.")
        elif folder.plan is not None:
            remarks.append(f"{folder.run.name}: no estimate, since its plan names no hardware.gpu.")
    longest = max((s for each in (*found, *estimated) for s in each.values()), default=0) or 1
    rows = []
    for name in (*PHASES, "other"):
        bars = [
            Bar(run, planned, 100 * each[name] / longest, duration(each[name]))
            for run in range(len(folders))
            for planned, each in ((False, found[run]), (True, estimated[run]))
            if name in each and (planned or each[name] > 0)
        ]
        metric = lookup(name)
        words = "The rest of time/step." if metric is None else metric.definition
        if bars:
            rows.append(Phase(name, words, bars))
    return rows, list(dict.fromkeys(remarks))


def memory(folders: Sequence[Folder]) -> Phase | None:
    """The most memory of a rank in any step, next to the plan's; None: no run has measured it."""
    name = "memory/peak"
    found = list[tuple[int, bool, float]]()
    for run, folder in enumerate(folders):
        values = folder.values(name)
        if not len(values):
            continue
        found.append((run, False, float(values.max())))
        if folder.plan is not None:
            on_cpu = folder.plan.device == "cpu"  # one memory for all
            stages = stage_memory(folder.plan)
            held = (s.held(p) + on_cpu * s.held(p, host=True) for s in stages for p in s.phases)
            found.append((run, True, max(held)))
    most = max((each[2] for each in found), default=0.0) or 1.0
    bars = [Bar(run, planned, 100 * b / most, size(round(b))) for run, planned, b in found]
    return Phase(name, GLOSSARY[name].definition, bars) if bars else None
