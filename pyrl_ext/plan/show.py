"""A plan as tables for people: its sections, and what follows from them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.memory import chunk_parameters, stage_memory
from pyrl_ext.plan.problems import show
from pyrl_ext.plan.schema import Section, Sections
from pyrl_ext.plan.shape import parameters


def print_plan(plan: Plan, console: Console) -> None:
    """Print every section, the derived facts, the notes and what is not supported."""
    console.print(f"[bold]{escape(plan.source)}[/]  (bold: not the default)")
    console.print(sections_table(plan))
    console.print("[cyan]follows[/]")
    console.print(facts_table(plan))
    if plan.parallel.pp > 1:
        console.print("[cyan]pipeline[/]")
        console.print(stages_table(plan))
    for note in plan.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
    for reason in plan.unsupported:
        console.print(f"[red]cannot run yet[/] {escape(reason)}")


def sections_table(plan: Plan) -> Table:
    """Key, value and meaning of every field; values that are not the default are bold."""
    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "meaning"):
        table.add_column(column, overflow="fold", style="dim" if column == "meaning" else None)
    for name, field in Sections.model_fields.items():
        value = getattr(plan, name)
        if not isinstance(value, Section):
            table.add_row(name, _value(value, field), escape(field.description or ""))
            continue
        table.add_row(f"[cyan]{name}[/]", "", f"[cyan]{type(value).__doc__}[/]")
        for key, inner in type(value).model_fields.items():
            table.add_row(
                f"  {key}", _value(getattr(value, key), inner), escape(inner.description or "")
            )
    return table


def facts_table(plan: Plan) -> Table:
    """What follows from the plan: ranks, parameters, bytes and batch numbers."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, fact in facts(plan):
        table.add_row(name, fact)
    return table


def stages_table(plan: Plan) -> Table:
    """What each chunk of each pipeline stage holds; layers and routers are 0-based global ids."""
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "chunk", "layers", "routers", "besides", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
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
                _ranges(chunk.layers),
                _ranges(tuple(layer for layer in chunk.layers if layer in plan.router_layers)),
                ", ".join(name for name, held in parts.items() if held),
                _count(chunk_parameters(plan, chunk).total),
            )
    return table


def facts(plan: Plan) -> list[tuple[str, str]]:
    """(name, text) of every derived fact."""
    parallel, shape = plan.parallel, plan.shape
    counts = parameters(shape)
    fullest = max(stage_memory(plan), key=lambda stage: stage.peak)
    routers = plan.router_layers
    expert_dp = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    ranks = f"dp {parallel.dp} x tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}"
    experts = f"ep {parallel.ep} x etp {parallel.etp_size} x dp {expert_dp}"
    rows = [
        ("ranks", f"{plan.world_size} = {ranks}; of experts {experts}"),
        ("parameters", f"{_count(counts.total)}, of which {_count(counts.active)} serve a token"),
        ("routers", f"{len(routers)} of {shape.num_hidden_layers} layers ({_ranges(routers)}), "
                    f"each picks {shape.topk} of {shape.num_experts} experts"),
        ("routes", _routes(plan)),
        ("rollout step", f"{plan.samples} samples in groups of {plan.batching.samples_per_prompt}"),
        ("minibatch", f"{plan.samples_per_minibatch} samples, {plan.batching.minibatches} a step"),
        ("microbatches", f"at most {_most_microbatches(plan)} a minibatch and replica: samples of "
                         f"{plan.max_rows} rows, padded to a multiple of {plan.row_alignment}"),
    ]  # fmt: skip
    rows += [(item.name, f"{size(item.bytes)} a rank, {item.why}") for item in fullest.items]
    rows.append(("together", f"{size(fullest.peak)} on the fullest rank"))
    return rows


def size(count: int) -> str:
    """Bytes with a binary unit."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _routes(plan: Plan) -> str:
    if not plan.replay.enabled:
        return "not replayed"
    each = plan.shape.route_bytes_per_token
    return f"{each} bytes a token, at most {size(each * plan.max_rows * plan.samples)} a step"


def _most_microbatches(plan: Plan) -> int:
    each = plan.batching.tokens_per_microbatch * plan.parallel.cp // plan.max_rows
    samples = -(-plan.samples_per_minibatch // plan.parallel.dp)
    return -(-samples // each)


def _count(number: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return str(number)


def _ranges(ids: tuple[int, ...]) -> str:
    """Rising ids with runs joined: (1, 2, 3, 5) -> 1-3, 5."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] == i - 1:
            runs[-1][1:] = [i]
        else:
            runs.append([i])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def _value(value: Any, field: Any) -> str:
    text = escape(value if isinstance(value, str) else show(value))
    return text if value == field.get_default(call_default_factory=True) else f"[bold]{text}[/]"
