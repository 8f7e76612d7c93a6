"""Run folders as they are now: plan, metrics, progress, and whether the run is alive."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyrl_ext.metrics.history import RunHistory, aim, columns, load_run
from pyrl_ext.parallel.atomic_write import lock_owner
from pyrl_ext.plan import ConfigError, Plan
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.units import count, duration

RECENT = 20  # steps whose pace gives the time left


class State(NamedTuple):
    """A run's state in a word and a sentence. ``tone``: "good", "bad" or "plain"."""

    tone: str
    word: str
    detail: str


class Folder:
    """A run folder.

    Attributes:
        plan: None if it cannot be read; then ``no_plan`` has the reason.

    Raises: OSError, ValueError as `load_run`.
    """

    def __init__(self, path: str | Path, name: str | None = None):
        self.path = Path(path)
        run = load_run(self.path)
        self.run = RunHistory(name or run.name, run.rows)
        self.columns = columns(self.run)
        self.aim = aim(run)
        self.step = sum("loss" in row or "time/update" in row for row in run.rows)
        self.plan: Plan | None = None
        self.no_plan = ""
        try:
            self.plan = Plan.read(self.path / "plan.json")
        except ConfigError as error:  # metrics of an earlier version are still worth a look
            self.no_plan = str(error)
        self.total = self.plan.steps if self.plan else None

    def finite(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and finite values of a metric."""
        steps, values = self.run.series(name)
        good = np.isfinite(values)
        return steps[good], values[good]

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.finite(name)[1]
        return float(values[-1]) if len(values) else None

    @property
    def line(self) -> str:
        """The plan in one line."""
        if (plan := self.plan) is None:
            return self.no_plan
        ranks = f"{plan.world_size} {plan.hardware.gpu or plan.device + ' rank'}"
        parts = [
            f"{plan.model.family}, {count(parameters(plan.sizes).total)} parameters",
            ranks + "s" * (plan.world_size > 1),
        ]
        step = f"{plan.samples} records a step"
        if plan.has_rollouts:
            step = f"{plan.batching.prompts} x {plan.batching.samples_per_prompt} samples a step"
            parts += [
                f"{plan.objective.loss}, {plan.objective.advantage}",
                f"engine {plan.rollout.engine}",
                f"replay {plan.replay.summary}",
            ]
        data = plan.data
        source = Path(data.task or data.prompts or data.path or "").name
        source = ", ".join(data.sources) or source
        return " · ".join(filter(None, (*parts, step, source)))

    @property
    def seconds(self) -> float:
        """Seconds in steps and checkpoints so far."""
        return self.run.total("time/step") + self.run.total("time/checkpoint")

    @property
    def left(self) -> str:
        """Time left at the pace of the last steps; empty if none is."""
        recent = self.finite("time/step")[1][-RECENT:]
        if self.total is None or self.total <= self.step or not len(recent):
            return ""
        return duration(float(np.median(recent)) * (self.total - self.step))

    @property
    def state(self) -> State:
        """State by the lock, the error and the steps of the run."""
        metrics = (self.path / "metrics.jsonl").stat().st_mtime
        since = f"last step {duration(max(0.0, time.time() - metrics))} ago"
        owner = lock_owner(self.path)
        if process := re.fullmatch(r"pid (\d+) on (.*)", owner):
            if process[2] != socket.gethostname():
                return State("plain", "runs", f"{owner}, by its lock; {since}")
            if os.path.exists(f"/proc/{process[1]}"):
                return State("good", "runs", f"{owner}; {since}")
        error = self.path / "error.txt"
        if error.is_file() and error.stat().st_mtime >= metrics:  # else the run resumed since
            return State("bad", "failed", last_line(error))
        if self.total is not None and self.step >= self.total:
            return State("good", "done", since)
        if process:
            return State("bad", "killed", f"{owner} has ended; {since}")
        return State("plain", "stopped", f"{since}; {self._next_start()}")

    def _next_start(self) -> str:
        if self.plan is not None and self.plan.resume == "never":
            return "the same command starts over (resume=never)"
        if any(self.checkpoints.values()):
            return "the same command resumes it"
        return "the same command is refused, since no checkpoint is whole: add resume=never"

    @property
    def checkpoints(self) -> dict[int, bool]:
        """Step of each checkpoint -> True if it is whole."""
        return {
            int(path.name.removeprefix("step-")): (path / "counters.json").is_file()
            for path in (self.path / "checkpoints").glob("step-*")
            if re.fullmatch(r"step-\d+", path.name)
        }


def last_line(error: Path) -> str:
    """The last line of a traceback that is not empty."""
    lines = error.read_text("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "empty")[:600]


def folders(paths: Sequence[str]) -> list[Folder]:
    """Run folders; each name begins where the paths differ."""
    resolved = [Path(path).resolve() for path in paths]
    parent = os.path.commonpath([path.parent for path in resolved])
    return [Folder(path, os.path.relpath(path, parent)) for path in resolved]
