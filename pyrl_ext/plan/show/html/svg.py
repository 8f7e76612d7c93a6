"""Markup for the page: every text is escaped, and pictures are drawn from a few shapes.

Colours are classes that page.html defines, for light, dark and print: `series-0` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import ceil, floor, log10

SERIES = 16
"""Colours that parts of a picture can have; further parts start again."""

WIDTH = 1180
"""Of a picture [px]; a page of 1280 holds it."""

_VOID = {"meta", "br", "rect", "line", "path"}

type Content = str | Iterable["Content"]


class Markup(str):
    """Text that is markup already; all other text is escaped."""


def join(content: Content) -> Markup:
    """Content as markup, one piece after the other."""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return Markup(escape(content, quote=False))
    return Markup("".join(map(join, content)))


def tag(name: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """An element. Attributes: `class_` is class, `stroke_width` is stroke-width; None and False
    leave one out, True writes its name alone."""
    written = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(key)
        elif value is not None and value is not False:
            shown = value if isinstance(value, str) else number(value)
            written.append(f'{key}="{escape(shown)}"')
    inner = join(content)
    if name in _VOID and not inner:
        return Markup(f"<{' '.join(written)}/>")
    return Markup(f"<{' '.join(written)}>{inner}</{name}>")


def number(value: float) -> str:
    """A coordinate, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def table(
    head: Iterable[Content], rows: Iterable[Iterable[Content]], caption: str, class_: str = ""
) -> Markup:
    """A table whose first column names the rows; it scrolls by itself where it is too wide."""
    header = tag("tr", [tag("th", each, scope="col") for each in head])
    body = [
        tag("tr", tag("th", first, scope="row"), [tag("td", each) for each in rest])
        for first, *rest in rows
    ]
    parts = tag("caption", caption), tag("thead", header), tag("tbody", body)
    return tag("div", tag("table", *parts, class_=class_ or None), class_="scroll")


def picture(height: float, title: str, *shapes: Content, width: float = WIDTH) -> Markup:
    """An SVG picture that shrinks with the page; `title` says what it shows."""
    return tag(
        "svg",
        tag("title", title),
        *shapes,
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    title: str,
    class_: str,
    label: str = "",
    over: str = "",
) -> Markup:
    """A rectangle that says `title` when pointed at, with a label where that has room.

    `over` is the class of a pattern on top of its colour.
    """
    place = {"x": x, "y": y, "width": max(width, 0.1), "height": height}
    inner = [tag("title", title), tag("rect", **place, class_=class_)]
    if over:
        inner.append(tag("rect", **place, class_=over))
    if label and text_width(label) + 4 <= width:
        middle = x + width / 2, y + height / 2 + 4
        inner.append(text(*middle, label, f"on {class_}", "middle"))
    return tag("g", inner)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> Markup:
    """A line of text; `y` is its baseline."""
    anchored = None if anchor == "start" else anchor
    return tag("text", words, x=x, y=y, class_=class_ or None, text_anchor=anchored)


def line(x: float, top: float, bottom: float, class_: str) -> Markup:
    """A vertical line."""
    return tag("line", x1=x, x2=x, y1=top, y2=bottom, class_=class_)


def grid_lines(
    most: float, unit: str, left: float, scale: float, top: float, bottom: float, about: int = 8
) -> Markup:
    """An axis from 0 to `most` units above a picture, and its lines down to `bottom`."""
    shapes = []
    for value in ticks(most, about):
        x = left + value * scale
        shapes.append(line(x, top - 4, bottom, "grid"))
        shapes.append(text(x, top - 8, f"{value:g} {unit}".strip(), "quiet small", "middle"))
    return join(shapes)


def text_width(words: str) -> float:
    """About the most that `words` take at the pictures' 12 px [px]."""
    return 7.2 * len(words)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """(class, words) of every colour."""
    items = []
    for class_, words in entries:
        square = tag("rect", width=14, height=14, class_=class_)
        items.append(tag("li", picture(14, words, square, width=14), words))
    return tag("ul", items, class_="legend")


def ticks(most: float, about: int = 6) -> list[float]:
    """Round numbers from 0 to `most`, around `about` of them."""
    if most <= 0:
        return [0.0]
    rough = most / about
    power = 10.0 ** floor(log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough * 0.999)
    return [step * i for i in range(ceil(most / step) + 1) if step * i <= most * 1.0001]
