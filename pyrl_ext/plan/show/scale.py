"""Prints what grows with the number of ranks, for `--scale`, and makes the table of the page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed

from pyrl_ext.plan.forecast.scale import WORLDS, Row, scale
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.sections import Block, Table

ABOUT = (
    "Counted from the plan, at the lengths of estimate; ~ estimated; * what differs if the batch "
    "is in proportion to dp. Left out: checkpoints, "
    "evaluation, and traffic of tp, pp, cp and ep within a replica, which stays as it is."
)
GROWTH = {"no": "no", "log": "log", "yes": "yes"}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
WIDE = 120
"""Columns of a terminal that has room for the reasons next to the numbers."""


def title_of(plan: Plan) -> str:
    """The batch and the layout."""
    parallel = plan.parallel
    layout = f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}, ep {parallel.ep}; dp grows"
    sizes = {name: len(grid.ranks) for name, grid in plan.grids.items()}
    own = [name for name, module in plan.modules.items() if module.ranks == "own"]
    beside = "".join(f"; {sizes[name]} of {name} beside every {sizes['llm']}" for name in own)
    of = " of the language model" if own else ""
    return f"{plan.samples} samples a step on any number of ranks{of} ({layout}{beside})"


def cells(row: Row) -> list[str]:
    """The numbers of a row; a dash where the layout does not fit the ranks."""
    return ["-" if value is None else _number(value, row.unit) for value in row.values]


def _number(value: float, unit: str) -> str:
    """Three digits of bytes; counts in full below a million."""
    if unit == "byte":
        power = max(p for p in range(len(UNITS)) if p == 0 or value >= 1000 * 1024 ** (p - 1))
        return f"{value / 1024**power:.3g} {UNITS[power]}"
    return f"{round(value):,}" if value < 1e6 else f"{value / 1e6:.3g}M"


def name_of(row: Row) -> str:
    """Its name with the unit, where the numbers do not show it."""
    return row.name if row.unit == "byte" else f"{row.name} [{row.unit}s]"


def print_scale(plan: Plan, console: Console) -> None:
    """Print the table; what grows with the ranks is yellow, and has its reason below where the
    terminal is narrow."""
    rows = scale(plan)
    wide = console.width >= WIDE
    console.print(f"\n[cyan]{escape(title_of(plan))}[/]")
    console.print(_printed(rows, wide))
    reasons = dict.fromkeys((name_of(row), row.why) for row in rows if row.growth == "yes")
    for name, why in reasons if not wide else ():
        console.print(f"[yellow]{escape(name)}[/] [dim]{escape(why)}[/]")
    console.print(f"[dim]{ABOUT}[/]")


def _printed(rows: Sequence[Row], reasons: bool) -> Printed:
    table = Printed(box=None, pad_edge=False)
    for name in ("by number of ranks", *map(str, WORLDS), "grows"):
        table.add_column(name, justify="right" if name.isdigit() else "left", no_wrap=True)
    if reasons:
        table.add_column("why", overflow="fold", style="dim")
    part = ""
    for row in rows:
        if row.part != part:
            part = row.part
            table.add_row(f"[bold]{part}[/]")
        tone = "yellow" if row.growth == "yes" else "default"
        shown = [f"  [{tone}]{escape(name_of(row))}[/]", *cells(row)]
        table.add_row(*shown, f"[{tone}]{GROWTH[row.growth]}[/]", *[escape(row.why)] * reasons)
    return table


def scale_block(plan: Plan) -> Block:
    """The table for the page."""
    head = ("of", "quantity", *map(str, WORLDS), "grows", "why")
    shown = [(r.part, name_of(r), *cells(r), GROWTH[r.growth], r.why) for r in scale(plan)]
    table = Table(head, shown, title_of(plan), "scale")
    return Block("By number of ranks", (ABOUT,), (), (table,))
