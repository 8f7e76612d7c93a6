"""A plan as tables for the terminal: verdicts first, and every field on request."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.summary import Summary, Table, values

_TONES = {"good": "bold green", "bad": "bold red", "plain": "bold"}


def print_plan(
    plan: Plan, console: Console, everything: bool = False, in_full: bool = False
) -> None:
    """Print verdicts, facts, memory, time, stages, changed fields, notes and unsupported features.

    Args:
        plan: the compiled plan
        console: where to print
        everything: print every field and not only changed ones, and reasons in full
        in_full: print reasons in full
    """
    summary = Summary(plan)
    console.print(f"[bold]{escape(plan.source)}[/]", soft_wrap=True)
    verdicts = Printed(box=None, pad_edge=False, show_header=False)
    for tone, answer, detail in summary.verdicts:
        verdicts.add_row(f"[{_TONES[tone]}]{answer}[/]", escape(detail))
    console.print(verdicts)
    for table in summary.tables():
        print_table(table, console, everything or in_full)
    for sentence in (*summary.time.assumed, summary.time.error) if summary.time else ():
        console.print(f"[dim]{escape(sentence)}[/]")
    title = "every field" if everything else "not the default (--all: every field, all words)"
    fields = [
        (f"{value.key}={value.text}", value.meaning)
        for value in values(plan)
        if everything or not value.is_default
    ]
    print_table(Table(title, ("", ""), fields), console, in_full=True)
    for note in plan.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    for reason in plan.unsupported:
        console.print(f"[red]cannot run yet[/] {escape(reason)}")


def print_table(table: Table, console: Console, in_full: bool) -> None:
    """Print a table without borders. Its last column holds reasons if it has a head: they are cut
    at the end of the line unless `in_full`."""
    printed = Printed(box=None, pad_edge=False, show_header=any(table.head))
    last = len(table.head) - 1
    cut = any(table.head) and table.head[-1] not in table.right and not in_full
    for number, column in enumerate(table.head):
        side = "right" if column in table.right else "left"
        printed.add_column(column, justify=side, overflow="fold", no_wrap=0 < number < last)
    if cut:
        column = printed.columns[-1]
        column.no_wrap = True
        column.overflow = "ellipsis"
        column.ratio = 1
        printed.expand = True
    if any(table.head):
        printed.columns[0].no_wrap = True
        printed.columns[-1].style = "dim" if table.head[-1] not in table.right else ""
    else:
        longest = max((len(row[0]) for row in table.rows), default=0)
        printed.columns[0].width = min(longest, console.width - 30)
    for row in table.rows:
        strong = row[0] in table.strong
        printed.add_row(*(f"[bold]{escape(cell)}[/]" if strong else escape(cell) for cell in row))
    console.print(f"\n[cyan]{escape(table.title)}[/]")
    console.print(printed)
