"""The metrics of a run, read back from its folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyrl_ext.metrics.glossary import GLOSSARY, RENAMED, lookup
from pyrl_ext.metrics.sinks import read_rows

# metric -> its steps and values
Columns = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class RunHistory:
    """The rows of a run folder's metrics.jsonl.

    Args:
        name: shown in tables and legends.
        rows: one a step, in order, at least one.
    """

    name: str
    rows: list[dict[str, float]]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [int64] and values [float64] of the rows that have the metric."""
        pairs = [(row["step"], row[name]) for row in self.rows if name in row]
        steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
        return steps.astype(int), values

    def total(self, name: str) -> float:
        """Sum of the finite values; 0 without any."""
        values = self.series(name)[1]
        return float(values.sum(where=np.isfinite(values)))


def columns(run: RunHistory) -> Columns:
    """Metric -> steps and values of the rows that have it, in the order of the glossary."""
    names = {name for row in run.rows for name in row} - {"step"}
    return {name: run.series(name) for name in sorted(names, key=_order)}


def _order(name: str) -> tuple[int, str]:
    metric = lookup(name)
    place = len(GLOSSARY) if metric is None else list(GLOSSARY).index(metric.name)
    return place, re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def aim(run: RunHistory) -> str:
    """The metric that a run improves: the reward, or the loss where there are no rewards."""
    return "reward" if any("reward" in row for row in run.rows) else "loss"


def load_run(folder: str | Path) -> RunHistory:
    """The run in ``folder``, with today's names of metrics.

    Raises:
        OSError: no metrics.jsonl that can be read.
        ValueError: no step in it, or a line that is not one.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"load_run: no {path}, expected a run folder with metrics.jsonl")
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"load_run: {path} has 0 steps, expected at least 1")
    rows = [{RENAMED.get(name, name): value for name, value in row.items()} for row in rows]
    return RunHistory(Path(folder).resolve().name, rows)
