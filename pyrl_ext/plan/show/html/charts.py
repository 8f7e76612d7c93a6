"""Charts of the page: boxes in rows over one horizontal axis, as numbers that page.html draws.

Colours are classes that page.css defines for light, dark and print: `series-0` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

SERIES = 16
"""Colours of a chart; more parts repeat them."""

WIDTH = 1180
"""Width of a chart [px]; a page of 1280 holds it."""


class Box(NamedTuple):
    """A rectangle with a tooltip, and a label if it has room for one."""

    x: float
    y: float
    width: float
    height: float
    title: str
    class_: str
    label: str = ""
    over: str = ""
    """Class of a pattern on top of its colour."""
    kind = "box"

    @property
    def has_room(self) -> bool:
        """True if the label fits, at 7.2 px a character."""
        return bool(self.label) and 7.2 * len(self.label) + 4 <= self.width


class Text(NamedTuple):
    """A line of text; `y` is its baseline."""

    x: float
    y: float
    words: str
    class_: str = ""
    anchor: str = "start"
    kind = "text"


class Line(NamedTuple):
    """A vertical line."""

    x: float
    top: float
    bottom: float
    class_: str
    kind = "line"


Shape = Box | Text | Line


class Chart(NamedTuple):
    """A picture; `title` says what it shows, the legend has a class and words for each colour."""

    title: str
    height: float
    shapes: list[Shape]
    legend: list[tuple[str, str]]


class Part(NamedTuple):
    """A piece of a bar."""

    name: str
    amount: float
    title: str
    estimated: bool = False


class Bar(NamedTuple):
    """A row of the chart: its group, its label, its parts, and their total in words."""

    group: str
    label: str
    parts: list[Part]
    total: str


def stacked_bars(
    title: str,
    bars: Sequence[Bar],
    unit: tuple[str, float],
    names: Iterable[str],
    limit: tuple[float, str] | None = None,
) -> Chart:
    """A chart of bars; bars of one group are next to each other.

    Args:
        title: what the chart shows
        bars: from top to bottom
        unit: of the axis, and its size in amounts
        names: of all parts in the order of their colours
        limit: (amount, label) of a line across all bars
    """
    left = 150
    right = 90
    first = 30
    gap = 10
    colours = {name: i % SERIES for i, name in enumerate(names)}
    most = max(*(sum(part.amount for part in bar.parts) for bar in bars), limit[0] if limit else 0)
    scale = (WIDTH - left - right) / (most * 1.02)
    step = 24 if len(bars) < 40 else 17
    top = float(first)
    group = None
    shapes: list[Shape] = []
    for bar in bars:
        top += gap if group and bar.group != group else 0
        x = float(left)
        base = top + (step - 5) / 2 + 4
        if bar.group and bar.group != group:
            shapes.append(Text(0, base, bar.group))
        shapes.append(Text(left - 8, base, bar.label, "quiet", "end"))
        for part in bar.parts:
            class_ = f"series-{colours[part.name]}"
            over = "estimated" if part.estimated else ""
            width = part.amount * scale
            shapes.append(Box(x, top, width, step - 5, part.title, class_, part.name, over))
            x += width
        shapes.append(Text(WIDTH, base, bar.total, "", "end"))
        top = top + step
        group = bar.group
    if limit:
        x = left + limit[0] * scale
        shapes += [Line(x, first - 8, top, "limit"), Text(x, 10, limit[1], "limit-text", "middle")]
    grid = axis(most / unit[1], unit[0], left, scale * unit[1], first, top)
    used = {part.name for bar in bars for part in bar.parts}
    legend = [(f"series-{colour}", name) for name, colour in colours.items() if name in used]
    if any(part.estimated for bar in bars for part in bar.parts):
        legend.append(("estimated", "hatched: estimated"))
    return Chart(title, top + 4, [*grid, *shapes], legend)


def axis(
    most: float, unit: str, left: float, scale: float, top: float, bottom: float, about: int = 8
) -> list[Shape]:
    """An axis from 0 to `most` units above a chart, and its grid lines down to `bottom`."""
    shapes: list[Shape] = []
    for value in ticks(most, about):
        x = left + value * scale
        shapes.append(Line(x, top - 4, bottom, "grid"))
        shapes.append(Text(x, top - 8, f"{value:g} {unit}".strip(), "quiet small", "middle"))
    return shapes


def ticks(most: float, about: int = 6) -> list[float]:
    """About `about` round numbers from 0 to `most`."""
    if most <= 0:
        return [0.0]
    rough = most / about
    power = 10.0 ** floor(log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * 0.999)
    return [step * i for i in range(ceil(most / step) + 1) if step * i <= most * 1.0001]
