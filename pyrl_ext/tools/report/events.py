"""Alarms and events of a run: metrics outside their bands, checkpoints, lost engines, drops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pyrl_ext.metrics.glossary import described
from pyrl_ext.tools.report.curves import Columns
from pyrl_ext.tools.report.state import Folder, last_line

# metrics that count what should be rare
COUNTED = (
    "turns/dropped",
    "turns/close_failed",
    "turns/retries",
    "eval_dropped",
    "rollout/dropped_groups",
    "rollout/aborted_groups",
    "rollout/stale_groups",
    "rollout/carried_groups",
    "rollout/refills",
    "servers/resent",
    "servers/prompts_failed",
    "policy/skipped_updates",
    "mismatch/nonfinite",
    "route/fallback_rows",
    "data/truncated",
)
ENGINE_CHANGES = 20  # most that are listed


@dataclass(frozen=True)
class Alarm:
    """A metric that was outside its band, or not finite.

    Args:
        run: number of the run.
        level: the worst that it reached.
        still: True if it is outside in the last step, too.
        last: last step outside.
        words: the alarm as a sentence without the name.
    """

    run: int
    name: str
    level: str
    still: bool
    last: int
    words: str
    definition: str


def alarms(run: int, columns: Columns) -> list[Alarm]:
    """Alarms of one run: those of the last step first, then the worst, then the newest."""
    found = [
        alarm
        for name, (steps, values) in columns.items()
        if (alarm := _alarm(run, name, steps, values)) is not None
    ]
    return sorted(found, key=lambda a: (not a.still, a.level, -a.last, a.name))


def _alarm(run: int, name: str, steps: np.ndarray, values: np.ndarray) -> Alarm | None:
    metric = described(name)
    levels = [metric.level(value) for value in values.tolist()]
    outside = np.flatnonzero([level != "ok" for level in levels])
    if not len(outside):
        return None
    level = "alarm" if "alarm" in levels else "warn"
    rising = metric.band is None or metric.band[1] > metric.band[0]
    size = np.where(np.isfinite(values), values if rising else -values, np.inf)
    worst = int(size.argmax())
    limit = ""
    if metric.band is not None and np.isfinite(values[worst]):
        side = "above" if rising else "below"
        limit = f" ({level} {side} {metric.band[level == 'alarm']:g})"
    first = int(steps[outside[0]])
    last = int(steps[outside[-1]])
    where = f"at step {first}"
    if len(outside) > 1:
        where = f"in {len(outside):,} of {len(steps):,} steps, {first} to {last}"
    return Alarm(
        run=run,
        name=name,
        level=level,
        still=levels[-1] != "ok",
        last=last,
        words=f"{values[worst]:.4g}{limit} at step {steps[worst]}; outside {where}",
        definition=metric.definition,
    )


@dataclass(frozen=True)
class ReportEvent:
    """One event, or many of one kind; ``step`` is that of the newest."""

    run: int
    step: int | None
    name: str
    detail: str


def events(run: int, folder: Folder) -> list[ReportEvent]:
    """Events of one run, the newest first."""
    found = [*_files(run, folder), *_engines(run, folder), *_counted(run, folder)]
    return sorted(found, key=lambda event: -1 if event.step is None else -event.step)


def _files(run: int, folder: Folder) -> Iterator[ReportEvent]:
    for step, whole in folder.checkpoints.items():
        yield ReportEvent(
            run, step, "checkpoint", "whole" if whole else "without counters: not finished"
        )
    if (error := folder.path / "error.txt").is_file():
        yield ReportEvent(run, None, "error", last_line(error))
    for path in sorted(folder.path.glob("before-*")):
        yield ReportEvent(
            run, None, "replaced", f"an earlier run moved to {path.name}/ (resume=never)"
        )


def _engines(run: int, folder: Folder) -> Iterator[ReportEvent]:
    """Steps in which more or fewer servers took the weights than in the step before."""
    steps, used = folder.finite("servers/used")
    changes = np.flatnonzero(np.diff(used)) + 1
    for at in changes[-ENGINE_CHANGES:].tolist():
        name = "engine lost" if used[at] < used[at - 1] else "engine joined"
        yield ReportEvent(
            run, int(steps[at]), name, f"{used[at - 1]:g} servers before, {used[at]:g} now"
        )


def _counted(run: int, folder: Folder) -> Iterator[ReportEvent]:
    for name in COUNTED:
        steps, values = folder.finite(name)
        some = values > 0
        if not some.any():
            continue
        metric = described(name)
        total = "" if metric.unit == "1" else f"{values[some].sum():,.6g} {metric.unit} in "
        detail = f"{total}{some.sum():,} of {len(steps):,} steps. {metric.definition}"
        yield ReportEvent(run, int(steps[some][-1]), name, detail)
