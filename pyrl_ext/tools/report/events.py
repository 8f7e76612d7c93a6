"""The events of a run besides its steps, as far as its folder tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pyrl_ext.metrics.glossary import lookup
from pyrl_ext.tools.report.state import Folder, last_line

# metrics that count what should be rare
COUNTED = (
    "turns/dropped",
    "turns/close_failed",
    "turns/retries",
    "eval_dropped",
    "rollout/dropped_groups",
    "rollout/aborted_groups",
    "rollout/too_old_groups",
    "rollout/carried_groups",
    "rollout/refills",
    "servers/resent",
    "servers/prompts_failed",
    "policy/skipped_updates",
    "mismatch/nonfinite",
    "route/fallback_rows",
    "data/truncated",
)


class Event(NamedTuple):
    """One event, or many of one kind; ``step`` is that of the newest."""

    run: int
    step: int | None
    what: str
    detail: str


def events(run: int, folder: Folder) -> list[Event]:
    """The events of one run, the newest first."""
    found = [*_files(run, folder), *_engines(run, folder), *_counted(run, folder)]
    return sorted(found, key=lambda event: -1 if event.step is None else -event.step)


def _files(run: int, folder: Folder) -> Iterator[Event]:
    for step, whole in folder.checkpoints.items():
        yield Event(run, step, "checkpoint", "whole" if whole else "without counters: not finished")
    if (folder.path / "error.txt").is_file():
        yield Event(run, None, "error", last_line(folder.path / "error.txt"))
    for path in sorted(folder.path.glob("before-*")):
        yield Event(run, None, "replaced", f"an earlier run moved to {path.name}/ (resume=never)")


def _engines(run: int, folder: Folder) -> Iterator[Event]:
    """Steps in which fewer or more servers took the weights than in the one before."""
    if "servers/used" not in folder.columns:
        return
    steps, used = folder.columns["servers/used"]
    steps = steps[np.isfinite(used)]
    used = used[np.isfinite(used)]
    changes = np.flatnonzero(np.diff(used)) + 1
    for at in changes[-20:].tolist():
        kind = "engine lost" if used[at] < used[at - 1] else "engine joined"
        yield Event(run, int(steps[at]), kind, f"{used[at - 1]:g} servers before, {used[at]:g} now")


def _counted(run: int, folder: Folder) -> Iterator[Event]:
    for name in COUNTED:
        if name not in folder.columns:
            continue
        steps, values = folder.columns[name]
        places = np.flatnonzero(np.isfinite(values) & (values > 0))
        if not len(places):
            continue
        metric = lookup(name)
        newest = int(steps[places[-1]])
        unit = "" if metric is None or metric.unit == "1" else f" {metric.unit}"
        total = "" if not unit else f"{values[places].sum():,.6g}{unit} in "
        words = "" if metric is None else metric.definition
        yield Event(run, newest, name, f"{total}{len(places):,} of {len(steps):,} steps. {words}")
