"""``python -m benchmarks.ahead_forecast FILE``: simulated engines apart against measured ones.

FILE (or - for standard input) is what ``python -m benchmarks.ahead --json`` prints: the size of a
step, and the measured seconds of a step for several values of rollout.ahead. One number is fitted,
an engine's seconds of a token, so that the simulated step without ahead takes as long as the
measured one; all other steps are predictions. The bar is 15 %.

    {"engines": 2, "slots": 8, "latency": 0.05, "pause": "abort", "keep": 4,
     "groups": [[[prompt tokens, [tokens of a turn, ...]], ...], ...],
     "steps": [{"ahead": 0, "seconds": 2.1, "train": 0.9, "publish": 0.1}, ...]}
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
LEAST, MOST = 1e-9, 1e3
"""Seconds of a token between which the fitted one is looked for."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class MeasuredStep(_Row):
    """Seconds of a step and of the trainer's parts of it, on average."""

    ahead: int = Field(ge=0)
    seconds: float = Field(gt=0)
    train: float = Field(ge=0)
    publish: float = Field(ge=0)


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


def compare(report: Report) -> tuple[float, list[Compared]]:
    """(fitted seconds of a token, every step with its prediction; the first is without ahead).

    Raises: ValueError where no step is without ahead, or the trainer's parts alone take longer.
    """
    steps = sorted(report.steps, key=lambda each: each.ahead)
    if steps[0].ahead:
        raise ValueError(f"steps: the first has ahead {steps[0].ahead}, expected one with 0")
    wait = steps[0].seconds - steps[0].train - steps[0].publish
    if wait <= 0:
        raise ValueError(f"steps: without ahead the trainer waits {wait:g} s, expected above 0")
    groups = [
        tuple(Trajectory(prompt, tuple(turns)) for prompt, turns in group)
        for group in report.groups
    ]

    def loop(step: MeasuredStep, token: float) -> Loop:
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
        )

    low, high = LEAST, MOST
    for _ in range(60):  # bisection of the logarithm
        middle = (low * high) ** 0.5
        slower = simulate(loop(steps[0], middle)).wait > wait
        low, high = (low, middle) if slower else (middle, high)
    token = (low * high) ** 0.5
    return token, [
        Compared(each.ahead, each.seconds, simulate(loop(each, token)).seconds) for each in steps
    ]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: every prediction is within the bar; 1: one is not; 2: no report."""
    parser = argparse.ArgumentParser(prog="benchmarks.ahead_forecast", description=__doc__)
    parser.add_argument("report", help="file that benchmarks.ahead --json wrote; -: standard input")
    path = parser.parse_args(arguments).report
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        token, found = compare(Report.model_validate(json.loads(text)))
    except (OSError, ValidationError, ValueError) as error:
        print(f"benchmarks.ahead_forecast: {path}: {error}", file=sys.stderr)
        return 2
    print(f"fitted: {token * 1e3:.3g} ms a token. Seconds of a step:")
    print("ahead  measured  simulated   error")
    for each in found:
        print(
            f"{each.ahead:5d}  {each.measured:8.3f}  {each.predicted:9.3f}  {each.error:+6.1%}"
            f"{'  (fitted)' if each.ahead == 0 else ''}"
        )
    return int(any(abs(each.error) > BAR for each in found))


if __name__ == "__main__":
    sys.exit(main())
