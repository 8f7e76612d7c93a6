"""``python -m benchmarks.ahead_forecast FILE``: simulated remote engines against measured ones.

FILE (or - for standard input) is what ``python -m benchmarks.ahead --json`` prints: the size of a
step, and for several values of rollout.ahead the measured seconds of a step, of the trainer's parts
of it and of a request on an engine, all of the same run: where trainer and engines share cores they
slow each other down. What is predicted is who waits for whom. The bar is 15 %.

    {"engines": 2, "slots": 8, "latency": 0.05, "pause": "abort", "keep": 4,
     "groups": [[[prompt tokens, [tokens of a turn, ...]], ...], ...],
     "steps": [{"ahead": 0, "seconds": 2.1, "train": 0.9, "publish": 0.1, "gather": 0.1,
                "beside": 0.3, "request": 0.02}, ...]}
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pyrl_ext.plan.forecast.ahead import simulate
from pyrl_ext.plan.forecast.loop import Loop, Pause, Trajectory

BAR = 0.15


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class MeasuredStep(_Row):
    """Seconds of a step, of the trainer's parts of it, and of a request, on average."""

    ahead: int = Field(ge=0)
    seconds: float = Field(gt=0)
    train: float = Field(ge=0)
    publish: float = Field(ge=0)
    gather: float = Field(ge=0)
    """of the publish: what the trainer waits for before it goes on"""
    beside: float = Field(ge=0)
    """of train: what does not wait for the rest of the publish"""
    request: float = Field(gt=0)


class Report(_Row):
    """A measured run."""

    engines: int = Field(ge=1)
    slots: int = Field(ge=1)
    keep: int = Field(ge=1)
    latency: float = Field(0.0, ge=0)
    pause: Pause = "abort"
    groups: list[list[tuple[int, list[int]]]] = Field(min_length=1)
    steps: list[MeasuredStep] = Field(min_length=1)


class Compared(NamedTuple):
    """A measured step and the predicted one [seconds]."""

    ahead: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less one."""
        return self.predicted / self.measured - 1


def compare(report: Report) -> list[Compared]:
    """Every step with its prediction, by ahead."""
    groups = [
        tuple(Trajectory(prompt, tuple(turns)) for prompt, turns in group)
        for group in report.groups
    ]
    turns = [tokens for group in groups for each in group for tokens in each.turns]

    def loop(step: MeasuredStep) -> Loop:
        token = step.request * len(turns) / sum(turns)
        return Loop(
            engines=report.engines,
            slots=report.slots,
            token=lambda running: token,
            read=lambda tokens: 0.0,
            train=step.train,
            publish=step.publish,
            groups=lambda step: groups,
            keep=report.keep,
            ahead=step.ahead,
            pause=report.pause,
            latency=report.latency,
            gather=step.gather if step.ahead else None,
            beside=step.beside,
        )

    steps = sorted(report.steps, key=lambda each: each.ahead)
    return [Compared(each.ahead, each.seconds, simulate(loop(each)).seconds) for each in steps]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: every prediction is within the bar; 1: one is not; 2: no report."""
    parser = argparse.ArgumentParser(prog="benchmarks.ahead_forecast", description=__doc__)
    parser.add_argument("report", help="file that benchmarks.ahead --json wrote; -: standard input")
    path = parser.parse_args(arguments).report
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        found = compare(Report.model_validate(json.loads(text)))
    except (OSError, ValidationError, ValueError) as error:
        print(f"benchmarks.ahead_forecast: {path}: {error}", file=sys.stderr)
        return 2
    print("Seconds of a step:\nahead  measured  simulated   error")
    for each in found:
        print(f"{each.ahead:5d}  {each.measured:8.3f}  {each.predicted:9.3f}  {each.error:+6.1%}")
    return int(any(abs(each.error) > BAR for each in found))


if __name__ == "__main__":
    sys.exit(main())
