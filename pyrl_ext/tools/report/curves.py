"""Curves of the page: every metric of every run, with a bounded number of points."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyrl_ext.metrics.glossary import described, explained
from pyrl_ext.metrics.history import Columns, RunHistory

# a chart as the page's script reads it
Chart = dict[str, Any]

POINTS = 240
"""Most points of a curve. In a longer run, a point is the mean of a stretch of steps."""

SHOWN_FIRST = (
    "reward",
    "loss",
    "mismatch/abs_mean",
    "route/agree_topk",
    "grad_norm",
    "policy/entropy",
    "rollout/response_len",
    "tokens_per_s",
)


def charts(runs: Sequence[Columns]) -> dict[str, Chart]:
    """One chart for each metric. Metrics that differ in the number at the end or in the source of
    prompts share one, and held-out metrics are in the chart of the metric in training."""
    found: dict[str, Chart] = {}
    for run, metrics in enumerate(runs):
        for name, (steps, values) in metrics.items():
            held = name in ("eval_reward", "eval_loss")
            family, label = _family(name.removeprefix("eval_") if held else name)
            chart = found.setdefault(family, _chart(family))
            curve = {"run": run, "label": label, "held": held} | thinned(steps, values)
            chart["curves"].append(curve)
    for name, chart in found.items():
        chart["log"] = name != "reward" and _spans_decades(chart["curves"])
    return found


def _family(name: str) -> tuple[str, str]:
    """Name of the chart of a metric, and what distinguishes its curve from others there."""
    if match := re.fullmatch(r"source/([^/]+)/(.+)", name):
        return f"source/<name>/{match[2]}", match[1]
    if match := re.fullmatch(r"(.*_)(\d+)", name):
        return f"{match[1]}<id>", match[2]
    return name, ""


def grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Names of charts by the part before the slash."""
    groups: dict[str, list[str]] = {}
    for name in names:
        prefix, slash, _ = name.partition("/")
        groups.setdefault(prefix if slash else "run", []).append(name)
    return groups


def thinned(steps: np.ndarray, values: np.ndarray, points: int = POINTS) -> dict[str, Any]:
    """A curve of at most ``points`` points, in five digits.

    Returns:
        ``steps`` and ``y``; ``low`` and ``high`` of each stretch if a point is a mean; ``bad``:
        points whose stretch has a value that is not finite, which the others leave out.
    """
    number = min(points, len(values))
    starts = np.arange(number) * len(values) // number
    good = np.isfinite(values)
    count = np.add.reduceat(good.astype(int), starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.add.reduceat(np.where(good, values, 0.0), starts) / count
    curve: dict[str, Any] = {"steps": steps[starts].tolist(), "y": _digits(mean)}
    if number < len(values):
        curve["low"] = _digits(np.minimum.reduceat(np.where(good, values, np.inf), starts))
        curve["high"] = _digits(np.maximum.reduceat(np.where(good, values, -np.inf), starts))
    curve["bad"] = np.flatnonzero(np.add.reduceat(~good, starts)).tolist()
    return curve


def hours(run: RunHistory) -> dict[str, Any] | None:
    """Some ``steps``, and the ``hours`` in steps and checkpoints until their end; None if steps
    were not timed."""
    if not run.total("time/step"):
        return None
    seconds = np.zeros(len(run.rows))
    for name in ("time/step", "time/checkpoint"):
        times = np.array([row.get(name, 0.0) for row in run.rows])
        seconds += np.where(np.isfinite(times), times, 0.0).cumsum()
    number = min(POINTS, len(seconds))
    places = np.arange(number) * len(seconds) // number
    steps = [int(run.rows[place]["step"]) for place in places]
    return {"steps": steps, "hours": _digits(seconds[places] / 3600)}


def _digits(values: np.ndarray) -> list[float | None]:
    rounded = [float(f"{value:.5g}") for value in values.tolist()]  # the largest may become inf
    return [value if np.isfinite(value) else None for value in rounded]


def _chart(name: str) -> Chart:
    metric = described(name)
    return {
        "name": name,
        "family": "<" in name,
        "unit": metric.unit.removeprefix("1"),
        "words": explained(name),
        "band": metric.band,
        "curves": [],
    }


def _spans_decades(curves: Sequence[dict[str, Any]]) -> bool:
    """True if a logarithmic axis shows more: all values are positive, over two decades or more."""
    values = [v for curve in curves for v in (*curve["y"], *curve.get("low", ())) if v is not None]
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)
