"""Events of a run: checkpoints, lost engines, drops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pyrl_ext.metrics.glossary import described, explained
from pyrl_ext.plan.changes import read_changes
from pyrl_ext.tools.report.state import Folder, last_line

# metrics that count what should be rare
COUNTED = (
    "scoring/dropped",
    "scoring/retries",
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
    for change in read_changes(folder.path):
        name = "plan changed" if change.init_from is None else "started from"
        yield ReportEvent(run, change.step, name, f"{change.text} ({change.time})")
    for step, whole in folder.checkpoints.items():
        yield ReportEvent(
            run, step, "checkpoint", "whole" if whole else "without counters: not finished"
        )
    for error in sorted(folder.path.glob("error*.txt")):
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
        detail = f"{total}{some.sum():,} of {len(steps):,} steps. {explained(name)}"
        yield ReportEvent(run, int(steps[some][-1]), name, detail)
