"""How a run stands: its plan in one line, its step, whether it runs, how long it takes."""

from __future__ import annotations

import os
import re
import socket
import time
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyrl_ext.metrics.history import Run, aim, load_run
from pyrl_ext.plan import ConfigError, Plan
from pyrl_ext.plan.forecast.units import count, duration
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.tools.report.curves import columns


class State(NamedTuple):
    """True if a run goes on, in a word and a sentence; tone as a `Verdict`'s."""

    tone: str
    word: str
    detail: str


class Folder:
    """A run folder as it is now.

    Args:
        path: of the folder.
        name: of the run, where several are shown.

    Raises: OSError, ValueError as `load_run`.
    """

    def __init__(self, path: str | Path, name: str | None = None):
        self.path = Path(path)
        run = load_run(self.path)
        self.run = Run(name or run.name, run.rows)
        self.columns = columns(self.run)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the run; None where `no_plan` says why."""
        return self._plan[0]

    @cached_property
    def no_plan(self) -> str:
        """Why there is no plan."""
        return self._plan[1]

    @cached_property
    def _plan(self) -> tuple[Plan | None, str]:
        try:
            return Plan.read(self.path / "plan.json"), ""
        except ConfigError as error:  # metrics of an earlier version are still worth a look
            return None, str(error)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return sum("loss" in row or "time/update" in row for row in self.run.rows)

    @property
    def aim(self) -> str:
        """The metric that the run improves."""
        return aim(self.run)

    def values(self, name: str) -> np.ndarray:
        """The finite values of a metric; empty where the run has none."""
        none = np.empty(0)
        values = self.columns.get(name, (none, none))[1]
        return values[np.isfinite(values)]

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        values = self.values(name)
        return float(values[-1]) if len(values) else None

    @property
    def line(self) -> str:
        """The plan in one line."""
        if (plan := self.plan) is None:
            return self.no_plan
        where = f"{plan.world_size} {plan.hardware.gpu or plan.device + ' rank'}"
        where += "s" * (plan.world_size > 1)
        parts = [f"{plan.model.family}, {count(parameters(plan.sizes).total)} parameters", where]
        batching = plan.batching
        step = f"{plan.samples} records a step"
        if plan.has_rollouts:
            step = f"{batching.prompts} x {batching.samples_per_prompt} samples a step"
            parts += [f"{plan.objective.loss}, {plan.objective.advantage}"]
            parts += [f"engine {plan.rollout.engine}"]
            parts += [f"replay {'on' if plan.replay.enabled else 'off'}"]
        source = str(plan.data.task or plan.data.prompts or plan.data.path or "")
        return " · ".join(part for part in (*parts, step, Path(source).name) if part)

    @property
    def total(self) -> int | None:
        """Steps that the plan wants."""
        return self.plan and self.plan.steps

    @property
    def seconds(self) -> float:
        """Seconds in steps and checkpoints so far."""
        return float(sum(self.values(n).sum() for n in ("time/step", "time/checkpoint")))

    @property
    def left(self) -> str:
        """Time left at the pace of the last steps; empty where there is none."""
        recent = self.values("time/step")[-20:]
        if self.total is None or self.total <= self.step or not len(recent):
            return ""
        return duration(float(np.median(recent)) * (self.total - self.step))

    @property
    def state(self) -> State:
        """True if the run goes on, by its lock, its error and its steps."""
        since, (owner, there) = duration(age(self.path)), holder(self.path)
        if there is None:
            return State("plain", "runs", f"says {owner}; last step {since} ago")
        if there:
            return State("good", "runs", f"{owner}; last step {since} ago")
        error = self.path / "error.txt"
        metrics = (self.path / "metrics.jsonl").stat()
        if error.is_file() and error.stat().st_mtime >= metrics.st_mtime:  # else it went on since
            return State("bad", "failed", last_line(error))
        if self.total is not None and self.step >= self.total:
            return State("good", "done", f"ended {since} ago")
        if owner:
            return State("bad", "killed", f"{owner} is no more; last step {since} ago")
        then = "the same command resumes it"
        if self.plan is not None and self.plan.resume == "never":
            then = "the same command starts over (resume=never)"
        elif not any(self.checkpoints.values()):
            then = "the same command is refused, since no checkpoint is whole: add resume=never"
        return State("plain", "stopped", f"last step {since} ago; {then}")

    @property
    def checkpoints(self) -> dict[int, bool]:
        """The step of each checkpoint, and whether it is whole."""
        return {
            int(path.name.removeprefix("step-")): (path / "counters.json").is_file()
            for path in (self.path / "checkpoints").glob("step-*")
            if re.fullmatch(r"step-\d+", path.name)
        }


def holder(run: Path) -> tuple[str, bool | None]:
    """The process that holds the lock of a run folder, "" where none does, and whether it is there;
    None: that is not known, since it is on another host."""
    lock = run / "lock"
    owner = lock.read_text("utf-8", "replace").strip() if lock.is_file() else ""
    found = re.fullmatch(r"pid (\d+) on (.*)", owner)
    if found is None:
        return "", False
    return owner, os.path.exists(f"/proc/{found[1]}") if found[2] == socket.gethostname() else None


def age(run: Path) -> float:
    """Seconds since the last step of a run folder."""
    return max(0.0, time.time() - (run / "metrics.jsonl").stat().st_mtime)


def last_line(error: Path) -> str:
    """The last line of a traceback that says something."""
    lines = [x.strip() for x in error.read_text("utf-8", "replace").splitlines() if x.strip()]
    return (lines or ["error.txt is empty"])[-1][:600]


def folders(paths: list[str]) -> list[Folder]:
    """The folders with distinct names: those of parents are added where they are equal."""
    full = [Path(path).resolve() for path in paths]
    return [Folder(path, _name(own, full)) for path, own in zip(paths, full, strict=True)]


def _name(own: Path, among: list[Path]) -> str:
    """The shortest end of ``own`` that no other path has."""
    for size in range(1, len(own.parts)):
        if len({path for path in among if path.parts[-size:] == own.parts[-size:]}) == 1:
            return "/".join(own.parts[-size:])
    return str(own)
