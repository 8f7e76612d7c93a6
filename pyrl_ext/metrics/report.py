"""A run on one screen and in one picture, and several runs side by side: ratios are to the first.

`pyrl report` prints it, as does a run at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyrl_ext.metrics.alarms import COLORS, MARKS, alarms, worst_of
from pyrl_ext.metrics.glossary import GLOSSARY, lookup
from pyrl_ext.metrics.history import RunHistory, aim, columns
from pyrl_ext.metrics.plot import plot

PHASES = {metric.name: metric.phase for metric in GLOSSARY.values() if metric.phase}
MEANS = (
    "mismatch/abs_mean",
    "route/agree_topk",
    "route/exact_set",
    "route/coverage",
    "policy/ppo_kl",
    "policy/clip_fraction",
    "policy/entropy",
    "rollout/response_len",
    "data/padding",
    "data/truncated",
    "tokens_per_s",
)

ALARMS = 5  # most problems that are listed
WORST_LAYER = "route/agree_topk, worst layer"
WORST_STEP = "mismatch/abs_mean, worst step"


def summary(run: RunHistory) -> dict[str, float]:
    """The figures of the report: name -> value, in the order shown.

    ``reward first`` and ``last`` are single steps, ``best`` the highest step; of a run without
    rollouts they are those of the loss, ``best`` the lowest. Other metrics are means over all
    steps, NaN if one step is NaN. ``worst layer`` has the lowest mean agreement, ``worst step`` the
    largest value.
    """
    name = aim(run)
    _, values = run.series(name)
    figures: dict[str, float] = {"steps": len(values)}
    if len(values):
        best = np.max(values) if name == "reward" else np.min(values)
        figures |= {f"{name} first": values[0], f"{name} last": values[-1], f"{name} best": best}
    _, evaluated = run.series(f"eval_{name}")
    if len(evaluated):
        figures |= {f"eval {name} start": evaluated[0], f"eval {name} end": evaluated[-1]}
    for name in MEANS:
        if len(values := run.series(name)[1]):
            figures[name] = values.mean()
            if name == "mismatch/abs_mean":
                figures[WORST_STEP] = np.max(values)  # NaN if one is
    layers = {n for row in run.rows for n in row if n.startswith("route/agree_topk/layer_")}
    if layers:
        figures[WORST_LAYER] = min(run.series(name)[1].mean() for name in layers)
    if broken := sum(not all(map(math.isfinite, row.values())) for row in run.rows):
        figures["steps with NaN or infinity"] = broken
    return figures


def phase_seconds(run: RunHistory) -> dict[str, float]:
    """Seconds of each phase over the whole run.

    ``other`` is the rest of time/step. Checkpoints are not part of time/step. A number that is not
    finite counts as missing.
    """
    seconds = {name: run.total(name) for name in PHASES}
    seconds = {name: total for name, total in seconds.items() if total > 0}
    steps = run.total("time/step")
    inside = sum(total for name, total in seconds.items() if name != "time/checkpoint")
    return seconds | {"other": max(0.0, steps - inside)}


def summary_table(runs: Sequence[RunHistory]) -> Table:
    """One row a figure, one column a run, and a ratio column for every run after the first."""
    table = _table("Run" if len(runs) == 1 else "Runs", ["figure"], runs)
    all_figures = [summary(run) for run in runs]
    for name in dict.fromkeys(n for figures in all_figures for n in figures):
        values = [figures.get(name) for figures in all_figures]
        _add_row(table, [name], values, [_figure(name, value) for value in values])
    return table


def time_table(runs: Sequence[RunHistory]) -> Table:
    """Seconds by phase with the share of the run, and whose time it is."""
    table = _table("Time by phase", ["phase", "whose"], runs)
    times = [phase_seconds(run) for run in runs]
    for times_of_run in times:
        ours = sum(s for name, s in times_of_run.items() if PHASES.get(name, "ours") == "ours")
        times_of_run |= {"ours together": ours, "all": sum(times_of_run.values())}
    names = [n for n in (*PHASES, "other") if any(n in t for t in times)]
    for name in [*names, "ours together", "all"]:
        whose = "" if name == "all" else PHASES.get(name, "ours")
        if name == "ours together":
            table.add_section()
        cells = [
            "-" if name not in t else f"{t[name]:,.2f} s {t[name] / (t['all'] or 1):6.1%}"
            for t in times
        ]
        _add_row(table, [name, whose], [t.get(name) for t in times], cells)
    replay = [run.total("time/replay") for run in runs]
    if any(replay):
        steps = [run.total("time/step") for run in runs]
        cells = [f"{r:,.2f} s {r / (s or 1):6.2%}" for r, s in zip(replay, steps, strict=True)]
        table.add_section()
        _add_row(table, ["routing replay, of the steps", "ours"], replay, cells)
    return table


def alarm_lines(run: RunHistory) -> Text:
    """The run's worst problems, each with its worst metric; what is left is on the page."""
    found = worst_of(alarms(columns(run)))
    if not found:
        return Text("none: every metric was finite and inside its band at every step")
    lines: list[Text] = []
    for alarm in found[:ALARMS]:
        words = f"{MARKS[alarm.level]} {alarm.problem}: {alarm.name} {alarm.words}"
        lines.append(Text(words, COLORS[alarm.level]))
    if len(found) > ALARMS:
        lines.append(Text(f"and {len(found) - ALARMS} more: pyrl report RUN --html shows all"))
    return Text("\n").join(lines)


def _table(title: str, headings: list[str], runs: Sequence[RunHistory]) -> Table:
    table = Table(*headings, title=title, title_justify="left", title_style="bold")
    for place, run in enumerate(runs):
        table.add_column(Text(run.name), justify="right")  # brackets are no markup
        if place:
            table.add_column("ratio", justify="right", style="dim")
    return table


def _add_row(
    table: Table, names: list[str], values: Sequence[float | None], cells: list[str]
) -> None:
    """The cells of all runs, each after the first with its ratio to the first."""
    row = [*names, cells[0]]
    for value, cell in zip(values[1:], cells[1:], strict=True):
        row += [cell, _ratio(value, values[0])]
    table.add_row(*row)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    metric = lookup(name.split(", worst")[0])
    unit = "" if metric is None or metric.unit in ("1", "reward") else f" {metric.unit}"
    text = f"{value:,.0f}" if abs(value) >= 1000 or name.startswith("steps") else f"{value:.4g}"
    level = "ok" if metric is None else metric.level(value)
    color = f"[{COLORS[level]}]" if level in COLORS else ""
    return f"{color}{text}{unit}{' !' if level == 'alarm' else ''}"


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base or not math.isfinite(value / base):
        return "-"
    return f"{value / base:.3g}x"


def print_report(
    runs: Sequence[RunHistory], png: str | Path, console: Console | None = None
) -> None:
    """The tables, the worst alarms and the picture of one or more runs."""
    console = console or Console()
    console.print(summary_table(runs))
    console.print(time_table(runs))
    for run in runs:
        title = "Alarms" if len(runs) == 1 else f"Alarms of {run.name}"
        console.print(Text(title, "bold"), soft_wrap=True)
        console.print(alarm_lines(run), soft_wrap=True)
    plot(runs, png)
    console.print(Text(f"Curves: {png}"), soft_wrap=True)
