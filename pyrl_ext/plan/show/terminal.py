"""A plan as tables for the terminal: verdicts first, and every field on request."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count as numbers

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pyrl_ext.plan.forecast.encoder import encoders
from pyrl_ext.plan.forecast.items import Item
from pyrl_ext.plan.forecast.parameters import chunk_parameters
from pyrl_ext.plan.forecast.step_time import StepTime
from pyrl_ext.plan.forecast.units import amount, count, duration, in_units, size, unit_for
from pyrl_ext.plan.language.errors import kind_at
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.remote_engines import ABOUT, engine_facts, printed
from pyrl_ext.plan.show.summary import Summary, facts, ranges, values

_TONES = {"good": "bold green", "bad": "bold red", "plain": "bold"}


def print_plan(plan: Plan, console: Console, everything: bool = False) -> None:
    """Print verdicts, facts, memory, time, stages, changed fields, notes and unsupported features.

    Args:
        plan: the compiled plan
        console: where to print
        everything: print every field and not only changed ones, and reasons in full
    """
    summary = Summary(plan)
    console.print(f"[bold]{escape(plan.source)}[/]", soft_wrap=True)
    console.print(verdict_table(summary))
    _titled(console, "follows", facts_table(plan))
    _titled(console, *memory_table(summary, everything))
    if summary.time is not None:
        _titled(console, "time of a step (estimated)", time_table(summary.time, everything))
        for sentence in (*summary.time.assumed, summary.time.error):
            console.print(f"[dim]{escape(sentence)}[/]")
    if plan.remote_engines:
        _engines(console, summary)
    if len(summary.memory) > 1 or plan.modules:
        _titled(console, "pipeline", stages_table(plan))
    if everything:
        _titled(console, "every field (bold: not the default)", sections_table(plan, console.width))
    else:
        _titled(
            console,
            "not the default (--all: every field, all words)",
            changes_table(plan, console.width),
        )
    for note in plan.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    for reason in plan.unsupported:
        console.print(f"[red]cannot run yet[/] {escape(reason)}")


def _engines(console: Console, summary: Summary) -> None:
    _titled(console, "remote engines", _rows_table(engine_facts(summary.plan)))
    if summary.states:
        console.print(printed(summary))
        console.print(f"[dim]{ABOUT}[/]")


def _titled(console: Console, title: str, table: Table) -> None:
    console.print(f"\n[cyan]{escape(title)}[/]")
    console.print(table)


def _table(*columns: str, whole: int = 1, right: Iterable[str] = ()) -> Table:
    """A table without borders: the first `whole` columns never wrap, `right` ones align right."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for number, column in enumerate(columns):
        side = "right" if column in right else "left"
        table.add_column(column, no_wrap=number < whole, overflow="fold", justify=side)
    return table


def _reasons_last(table: Table, in_full: bool) -> None:
    """The last column holds reasons: cut at the end of the line unless `in_full`."""
    column = table.columns[-1]
    column.style = "dim"
    if not in_full:
        column.no_wrap = True
        column.overflow = "ellipsis"
        column.ratio = 1
        table.expand = True


def verdict_table(summary: Summary) -> Table:
    """True if the plan is consistent, fits and can run."""
    table = _table("", "")
    for tone, answer, detail in summary.verdicts:
        table.add_row(f"[{_TONES[tone]}]{answer}[/]", escape(detail))
    return table


def facts_table(plan: Plan) -> Table:
    """Derived numbers: ranks, groups, parameters, routes and batch sizes."""
    return _rows_table(facts(plan))


def _rows_table(rows: Iterable[tuple[str, str]]) -> Table:
    table = _table("", "")
    for name, fact in rows:
        table.add_row(name, escape(fact))
    return table


def memory_table(summary: Summary, in_full: bool = False) -> tuple[str, Table]:
    """(title, items of the fullest stage by phase, with totals and headroom)."""
    stage = summary.fullest
    limit = summary.limit
    unit, factor = unit_for(max(stage.peak, limit or 0))
    several = len(summary.memory) > 1
    where = f" of {stage.name}, the fullest of {len(summary.memory)}" if several else ""
    columns = ("item", *stage.phases, "how it is counted")
    table = _table(*columns, whole=len(columns) - 1, right=stage.phases)
    _reasons_last(table, in_full)
    for host in (False, True):
        items = [item for item in stage.items if item.host == host]
        for item in items:
            held = [
                in_units(item.bytes, factor) if each in item.phases else "" for each in stage.phases
            ]
            table.add_row(_item_name(item), *held, escape(item.why))
        if not items:
            continue
        total = [stage.held(phase, host) for phase in stage.phases]
        name = "together on the host" if host else "together"
        table.add_row(f"[bold]{name}[/]", *(f"[bold]{in_units(each, factor)}[/]" for each in total))
        if limit is not None and not host:
            left = [in_units(limit - each, factor) for each in total]
            left = [f"[red]{each}[/]" if each.startswith("-") else each for each in left]
            table.add_row("headroom", *left, f"of {size(limit)}, {summary.device}")
    return f"memory of a rank{where} [{unit}] (~ estimated)", table


def _item_name(item: Item) -> str:
    host = " (host)" if item.host else ""
    estimated = "" if item.exact else "~ "
    return escape(f"{estimated}{item.name}{host}")


def time_table(time: StepTime, in_full: bool = False) -> Table:
    """Time of every phase and of each kind of work in it, with the assumption behind it."""
    table = _table("phase", "time", "share", "assumed", whole=3, right=("time", "share"))
    _reasons_last(table, in_full)
    for phase in dict.fromkeys(cost.phase for cost in time.costs):
        costs = [cost for cost in time.costs if cost.phase == phase]
        table.add_row(f"[bold]{phase}[/]", *_took(time.seconds(phase), time.total), "")
        for cost in costs:
            name = f"  {escape(cost.name)}"
            took = _took(cost.seconds, time.total)
            table.add_row(name, *took, escape(f"{amount(cost.amount, cost.unit)}: {cost.why}"))
    table.add_row(
        "[bold]together[/]", *_took(time.total, time.total), f"MFU of the update {time.mfu:.0%}"
    )
    return table


def _took(seconds: float, total: float) -> tuple[str, str]:
    return duration(seconds), f"{seconds / total:.0%}"


def stages_table(plan: Plan) -> Table:
    """Contents of each chunk of each pipeline stage, then of encoders; layers and routers are
    0-based global ids."""
    columns = ("stage", "chunk", "layers", "routers", "besides", "parameters")
    table = _table(*columns, right=("parameters",))
    for rank, stage in enumerate(plan.stages):
        for number, chunk in enumerate(stage):
            parts = {
                "embedding": chunk.embedding,
                f"{chunk.mtp} mtp": chunk.mtp,
                "loss": chunk.loss,
            }
            table.add_row(
                str(rank),
                str(number),
                ranges(chunk.layers),
                ranges(tuple(layer for layer in chunk.layers if layer in plan.router_layers)),
                ", ".join(name for name, held in parts.items() if held),
                count(chunk_parameters(plan, chunk).total),
            )
    own = numbers(plan.parallel.pp)
    for each in encoders(plan):
        for stage, layers in enumerate(each.stage_layers):
            held = count(each.parameters(stage).total)
            rest = ", ".join(each.besides(stage))
            number = 0 if each.shared else next(own)
            table.add_row(f"{number} ({each.name})", "0", ranges(layers), "none", rest, held)
    return table


def changes_table(plan: Plan, width: int) -> Table:
    """The fields that differ from their default, as overrides, with their meaning."""
    changed = [value for value in values(plan) if not value.is_default]
    return _fields_table(
        [(f"{key}=[bold]{escape(text)}[/]", about) for key, text, about, _ in changed], width
    )


def sections_table(plan: Plan, width: int) -> Table:
    """Every field with its meaning; values that differ from the default are bold."""
    rows = []
    above = ""
    for key, text, meaning, is_default in values(plan):
        section, _, name = key.rpartition(".")
        if section != above:
            kind = kind_at(tuple(section.split("."))) if section else None
            above = section
            about = kind.__doc__ if kind else ""
            rows.append((f"[cyan]{section}[/]", about or ""))
        shown = escape(text) if is_default else f"[bold]{escape(text)}[/]"
        rows.append((f"{'  ' if section else ''}{name}: {shown}", meaning))
    return _fields_table(rows, width)


def _fields_table(rows: list[tuple[str, str]], width: int) -> Table:
    """A table of (field in markup, meaning); fields wrap to leave room for the meanings."""
    table = _table("field", "meaning", whole=0)
    longest = max(Text.from_markup(field).cell_len for field, _ in rows)
    table.columns[0].width = min(longest, width - 30)
    table.columns[1].style = "dim"
    for field, meaning in rows:
        table.add_row(field, escape(meaning))
    return table
