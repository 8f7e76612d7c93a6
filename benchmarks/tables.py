"""Tables as the benchmarks print them: on a terminal, and in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

SLOWER = "*"
"""Behind the ratio of a comparison that we lose."""
_WON = r" [\d.]+x(?!\*)"
_LOST = r" [\d.]+x\*"


def show(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
    words: int = 1,
    **options: Any,
) -> None:
    """Print a table; on a terminal with the ratios of `table_of` in color.

    Args:
        rows:    cells; a row without any is a line across.
        width:   columns of the terminal; None: as it says.
        words:   number of columns that hold words; the others are numbers, on the right.
        options: of rich's table.
    """
    table = Table(caption_justify="left", **options)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < words else "right")
    for row in rows:
        if row:
            table.add_row(*map(_colored, row))
        else:
            table.add_section()
    Console(width=width).print(table)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """The lines of a table in Markdown."""
    rule = ["---" if index < words else "---:" for index in range(len(columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def _colored(cell: str) -> Text:
    """Green for a ratio of a comparison that we win, red for one that we lose."""
    text = Text(cell)
    text.highlight_regex(_WON, "green")
    text.highlight_regex(_LOST, "red")
    return text


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of what was measured: the numbers of all rows, then a column for each
    baseline of any."""
    numbers = list(dict.fromkeys(n for row in rows for n in row if n not in ("baselines", "bars")))
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))

    def cell(row: dict[str, Any], name: str) -> str:
        value = row.get(name, "")
        return value if isinstance(value, str) else f"{value:.3g}"

    def against(row: dict[str, Any], name: str) -> str:
        of = row["baselines"].get(name)
        if not of:
            return ""
        mark = SLOWER if of["times"] < 1 else ""
        error = f" +-{of['error']:.0e}" if "error" in of else ""
        return f"{_plain(of['ms'])} {_plain(of['times'])}x{mark}{error}"

    cells = [[cell(r, n) for n in numbers] + [against(r, n) for n in names] for r in rows]
    return numbers + names, cells


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bars(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a bar: what the cases that have it reached, in their order; ``!`` where one fails."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for bar in row["bars"]:
            found.setdefault(bar["bar"], []).append(bar)
    return [
        f"{'PASS' if all(b['pass'] for b in own) else 'FAIL'}  {text}:  "
        + "  ".join(f"{b['found']:.3g}{'' if b['pass'] else '!'}" for b in own)
        for text, own in found.items()
    ]


def count(rows: Sequence[dict[str, Any]]) -> str:
    """Number of bars the cases have and of comparisons with baselines, and how many are missed or
    lost."""
    passed = [bar["pass"] for row in rows for bar in row["bars"]]
    times = [of["times"] for row in rows for of in row["baselines"].values()]
    lost = sum(each < 1 for each in times)
    return (
        f"{len(passed)} bars, {passed.count(False)} missed; "
        f"{len(times)} comparisons, {lost} slower than a baseline"
    )
