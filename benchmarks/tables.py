"""Tables as the benchmarks print them: on a terminal, and in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
    words: int = 1,
    **options: Any,
) -> None:
    """Print a table.

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
            table.add_row(*row)
        else:
            table.add_section()
    Console(width=width).print(table)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """The lines of a table in Markdown."""
    rule = ["---" if index < words else "---:" for index in range(len(columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))
