"""A picture of one family: milliseconds a case, ours and each baseline, over the floor; or, of
cases with errors, against these."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

COLORS = ["#1b6ca8", "#8a8f98", "#e0a458", "#c8553d", "#7a9e7e", "#6c4a8b", "#3b3b3b"]
COLORS += ["#c48ab0", "#56a0a0", "#9c7a3c"]
MARKERS = ("*", "o")  # ours, theirs


def plot(report: dict[str, Any], path: Path) -> None:
    """Write the PNG ``path`` from what ``benchmarks.run`` measured (its ``--json``)."""
    exact = [row for row in report["rows"] if "max error" in row]
    figure = _against_errors(exact) if exact else _bars(report["rows"])
    figure.suptitle(f"{report['family']}: {report['device']}", x=0.01, ha="left", fontsize=10)
    figure.savefig(path)


def _against_errors(rows: Sequence[dict[str, Any]]) -> Figure:
    """A panel a case: fast is left, exact is down."""
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    across = min(len(rows), 3)
    down = -(-len(rows) // 3)
    figure = Figure(figsize=(1 + 3 * across, 1 + 2.7 * down), dpi=150, layout="constrained")
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes, row in zip(panels.T.flat if down == 2 else panels.flat, rows, strict=False):
        ours = {"ms": row["ms"], "error": row["max error"]}
        for index, (name, of) in enumerate([("ours", ours), *row["baselines"].items()]):
            color = COLORS[1 + names.index(name) % (len(COLORS) - 1) if index else 0]
            axes.scatter(of["ms"], of["error"], 45, color, marker=MARKERS[index > 0], label=name)
        axes.set(xscale="log", yscale="log", xlabel="fastest call [ms]")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(row["case"], loc="left", fontsize=8)
        axes.grid(alpha=0.3, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("max error to float64 [nats]")
    handles, labels = max(
        (x.get_legend_handles_labels() for x in panels.flat), key=lambda x: len(x[1])
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _bars(rows: Sequence[dict[str, Any]]) -> Figure:
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    height = 0.8 / (1 + len(names))
    figure = Figure(figsize=(9, 1.2 + 0.9 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(["ours", *names]):
        at = [i + index * height for i in range(len(rows))]
        ms = [_ms(row, name) for row in rows]
        axes.barh(at, ms, 0.92 * height, color=COLORS[index % len(COLORS)], label=name)
        for y, value in zip(at, ms, strict=True):
            if value:
                axes.annotate(
                    f"{value:.0f}" if value >= 100 else f"{value:.3g}",
                    (value, y),
                    (3, 0),
                    textcoords="offset points",
                    fontsize=7,
                    va="center",
                )
    for i, row in enumerate(rows):
        floor = row["ms"] * row["% of floor"] / 100
        label = "floor: a copy of as many bytes" if i == 0 else None
        axes.plot([floor] * 2, [i - height / 2, i + 0.8], color="black", lw=1.5, label=label)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(rows))], [r["case"] for r in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("fastest call [ms, log scale]")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False, fontsize=8)
    return figure


def _ms(row: dict[str, Any], name: str) -> float:
    if name == "ours":
        return row["ms"]
    return row["baselines"].get(name, {"ms": 0.0})["ms"]
