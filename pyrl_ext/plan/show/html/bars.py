"""Stacked bars below one axis: bytes or seconds, a bar a row, a colour a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyrl_ext.plan.show.html.svg import (
    SERIES,
    WIDTH,
    Content,
    Markup,
    box,
    grid_lines,
    join,
    legend,
    line,
    picture,
    text,
)


class Part(NamedTuple):
    """A piece of a bar."""

    name: str
    amount: float
    title: str
    estimated: bool = False


class Row(NamedTuple):
    """A bar: what it belongs to, its own label, its pieces and what they come to."""

    group: str
    label: str
    parts: list[Part]
    total: str


class Limit(NamedTuple):
    """A line across all bars."""

    amount: float
    label: str


_LEFT, _RIGHT, _TOP, _GAP = 150, 90, 30, 10
_MANY = 40  # bars; they are drawn narrower


def bars(
    title: str,
    rows: Sequence[Row],
    names: list[str],
    unit: tuple[str, float],
    limit: Limit | None = None,
) -> Markup:
    """A legend and a picture of all rows; those of one group stand together.

    Args:
        title: what the picture shows
        rows: from top to bottom
        names: of all parts; the position is the colour
        unit: of the axis, and what it is of the amounts
        limit: where to draw a line
    """
    most = max([sum(part.amount for part in row.parts) for row in rows])
    most = max(most, limit.amount if limit else 0)
    scale = (WIDTH - _LEFT - _RIGHT) / (most * 1.02)
    each, top, above, shapes = (24 if len(rows) < _MANY else 17), float(_TOP), "", []
    for row in rows:
        top += _GAP if above and row.group != above else 0
        shapes.append(_row(row, names, top, each - 5, scale, named=row.group != above))
        top, above = top + each, row.group
    lines: list[Content] = [grid_lines(most / unit[1], unit[0], _LEFT, scale * unit[1], _TOP, top)]
    if limit:
        x = _LEFT + limit.amount * scale
        shapes.append(line(x, _TOP - 8, top, "limit"))
        shapes.append(text(x, 10, limit.label, "limit-text", "middle"))
    used = {part.name for row in rows for part in row.parts}
    colours = [(f"series-{i % SERIES}", name) for i, name in enumerate(names) if name in used]
    if any(part.estimated for row in rows for part in row.parts):
        colours.append(("estimated", "hatched: estimated"))
    return join((legend(colours), picture(top + 4, title, lines, shapes)))


def _row(
    row: Row, names: list[str], top: float, height: float, scale: float, named: bool
) -> Markup:
    base, left = top + height / 2 + 4, float(_LEFT)
    shapes = [text(0, base, row.group)] if named and row.group else []
    shapes.append(text(_LEFT - 8, base, row.label, "quiet", "end"))
    for part in row.parts:
        class_ = f"series-{names.index(part.name) % SERIES}"
        over, width = "estimated" if part.estimated else "", part.amount * scale
        shapes.append(box(left, top, width, height, part.title, class_, part.name, over))
        left += width
    return join((shapes, text(WIDTH, base, row.total, "", "end")))
