"""The curves of the page: every metric of every run, thinned so that the page's size is bounded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pyrl_ext.metrics.glossary import GLOSSARY, lookup
from pyrl_ext.metrics.history import Run

# metric -> its steps and values
Columns = Mapping[str, tuple[np.ndarray, np.ndarray]]

POINTS = 240
"""Most points of a curve. A longer run's are the means of so many stretches of equal length, with
their smallest and largest value."""

MOSTLY = ("loss", "mismatch/abs_mean", "route/agree_topk", "grad_norm", "policy/entropy",
          "rollout/response_len", "tokens_per_s")  # fmt: skip
"""Shown first, after what the run improves."""

# title of a group -> how the names of its metrics begin, in the order of the glossary
GROUPS = {
    "The run": (),  # what no other group has
    "Rollout engine against trainer": ("mismatch",),
    "The update": ("policy",),
    "Routing": ("route",),
    "Turns": ("turns",),
    "Samples": ("rollout", "data"),
    "Age of samples": ("age",),
    "Remote engines": ("servers", "publish"),
    "Time": ("time", "tokens_per_s"),
    "Bytes": ("batch", "memory"),
}


class Curves(NamedTuple):
    """The numbers that the page's script draws.

    Args:
        steps: distinct lists of steps, which curves name by their place.
        charts: one a metric, and a chart of each family of metrics that end in a number.
        groups: title -> ids of its charts.
        first: ids of the charts that are shown first.
    """

    steps: list[list[int]]
    charts: dict[str, dict[str, Any]]
    groups: dict[str, list[str]]
    first: list[str]


def curves(runs: Sequence[Columns]) -> Curves:
    """The charts of one or more runs, from the columns of each."""
    steps: dict[tuple[int, ...], int] = {}
    charts: dict[str, dict[str, Any]] = {}
    for place, run in enumerate(runs):
        for name, (at, values) in run.items():
            chart = charts.setdefault(family(name), _chart(family(name)))
            held = name in ("eval_reward", "eval_loss")
            number = re.search(r"_(\d+)$", name)
            label = "held out" if held else number[1] if chart["family"] and number else ""
            curve = thinned(at, values)
            curve["steps"] = steps.setdefault(tuple(curve["steps"]), len(steps))
            chart["curves"].append({"run": place, "label": label, "held": held} | curve)
    for name, chart in charts.items():
        # a reward is read against its largest value: a learnt run would be a line at the top
        chart["log"] = name != "reward" and _spans_decades(chart["curves"])
        chart["curves"].sort(key=lambda c: (c["held"], int(c["label"]) if chart["family"] else 0))
    aims = dict.fromkeys("reward" if "reward" in run else "loss" for run in runs)
    first = [name for name in (*aims, *MOSTLY) if name in charts]
    return Curves(
        [list(each) for each in steps], charts, _grouped(charts), list(dict.fromkeys(first))
    )


def columns(run: Run) -> Columns:
    """Metric -> steps and values of the rows that have it, in the order of the glossary."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in run.rows:
        step = row["step"]
        for name, value in row.items():
            at, values = found.setdefault(name, ([], []))
            at.append(step)
            values.append(value)
    order = {name: number for number, name in enumerate(GLOSSARY)}
    place: dict[str, tuple[int, str]] = {}
    for name in found.keys() - {"step"}:
        metric = lookup(name)
        place[name] = (len(order) if metric is None else order[metric.name], _padded(name))
    names = sorted(place, key=place.__getitem__)
    return {
        name: (np.array(found[name][0], int), np.array(found[name][1], float)) for name in names
    }


def family(name: str) -> str:
    """The chart of a metric: metrics that differ in the number at the end share one, and what is
    held out is drawn with the metric it belongs to."""
    return re.sub(r"_\d+$", "_<id>", {"eval_reward": "reward", "eval_loss": "loss"}.get(name, name))


def thinned(steps: np.ndarray, values: np.ndarray, points: int = POINTS) -> dict[str, Any]:
    """A curve of at most ``points`` points, in five digits.

    Returns:
        ``steps`` and ``y``; with more values than that ``low`` and ``high`` of each stretch;
        ``bad``: points whose stretch has a value that is not finite, which the others leave out.
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
    whole = np.add.reduceat(np.ones(len(values), int), starts)
    if (count < whole).any():
        curve["bad"] = np.flatnonzero(count < whole).tolist()
    return curve


def _digits(values: np.ndarray) -> list[float | None]:
    found = [float(f"{value:.5g}") for value in values.tolist()]  # the largest may round to inf
    return [value if np.isfinite(value) else None for value in found]


def _chart(name: str) -> dict[str, Any]:
    metric = lookup(name)
    known = {"unit": "", "words": "This version of the glossary does not know it.", "band": None}
    if metric is not None:
        unit = "" if metric.unit == "1" else metric.unit
        known = {"unit": unit, "words": metric.definition, "band": metric.band}
    return {"name": name, "family": name.endswith("_<id>"), "curves": []} | known


def _spans_decades(curves: Sequence[dict[str, Any]]) -> bool:
    """True if a logarithmic axis shows more: all values are positive, over two decades or more."""
    values = [v for curve in curves for v in (*curve["y"], *curve.get("low", ())) if v is not None]
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)


def _grouped(charts: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    prefixes = {prefix: title for title, names in GROUPS.items() for prefix in names}
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in charts:
        groups[prefixes.get(name.split("/")[0], "The run")].append(name)
    return {title: names for title, names in groups.items() if names}


def _padded(name: str) -> str:
    """For sorting: numbers as numbers."""
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)
