"""A picture of one family: milliseconds a case, ours and each baseline, over the floor."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLORS = ["#1b6ca8", "#8a8f98", "#e0a458", "#c8553d", "#7a9e7e"]


def plot(report: dict[str, Any], path: Path) -> None:
    """Write the PNG ``path`` from what ``benchmarks.run`` measured (its ``--json``)."""
    rows = report["rows"]
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
        floor = row["fastest ms"] * row["% of floor"] / 100
        label = "floor: a copy of as many bytes" if i == 0 else None
        axes.plot([floor] * 2, [i - height / 2, i + 0.8], color="black", lw=1.5, label=label)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(rows))], [r["case"] for r in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("fastest call [ms, log scale]")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{report['family']}: {report['device']}", loc="left", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False, fontsize=8)
    figure.savefig(path)


def _ms(row: dict[str, Any], name: str) -> float:
    if name == "ours":
        return row["fastest ms"]
    return row["baselines"].get(name, {"ms": 0.0})["ms"]
