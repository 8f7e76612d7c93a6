"""The charts and tables of the page, as data for page.html."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import batched, groupby, pairwise
from typing import NamedTuple

from markupsafe import Markup

from pyrl_ext.plan.forecast.compute_time import Passes
from pyrl_ext.plan.forecast.encoder import encoders
from pyrl_ext.plan.forecast.hardware import gpu_of
from pyrl_ext.plan.forecast.items import Item
from pyrl_ext.plan.forecast.memory import StageMemory, num_stages
from pyrl_ext.plan.forecast.parameters import chunk_parameters
from pyrl_ext.plan.forecast.step_time import Cost, StepTime
from pyrl_ext.plan.forecast.units import amount, count, duration, in_units, size, unit_for
from pyrl_ext.plan.forecast.workload import update_rounds
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.ranks import Grid
from pyrl_ext.plan.phases import MEMORY_PHASES
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.charts import (
    SERIES,
    WIDTH,
    Bar,
    Box,
    Chart,
    Part,
    Shape,
    Text,
    axis,
    stacked_bars,
)
from pyrl_ext.plan.show.summary import Summary, ranges
from pyrl_ext.schedule.pipeline import Ahead, Slot, ahead_of, bubble_share, pipeline


class Table(NamedTuple):
    """A table whose first column names the rows."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    caption: str
    class_: str = ""


class Block(NamedTuple):
    """A section that was asked for on the command line."""

    title: str
    sentences: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]


def code(text: str) -> Markup:
    """`text` in a monospaced font."""
    return Markup("<code>{}</code>").format(text)


# Ranks ------------------------------------------------------------------------------------------

MEANINGS = {
    "tp": "share every layer's products, and the rows between them",
    "cp": "share the rows of one sequence",
    "dp": "hold the same parameters for other samples",
    "dp_cp": "add up gradients of dense parameters, and spread optimizer state",
    "pp": "hold the stages of one model, in order",
    "ep": "hold the experts of one layer, and exchange tokens",
    "expt_tp": "share the width of an expert",
    "expt_dp": "add up gradients of experts, and spread their optimizer state",
}


class Cell(NamedTuple):
    """One rank on the map."""

    rank: int
    axes: list[str]
    """Its coordinates along axes of more than one rank."""
    groups: list[str]
    """Its groups as words that the page's script compares."""
    edge: int
    """Colour of its pipeline stage."""


def nodes(plan: Plan) -> list[list[Cell]]:
    """Ranks by node and device."""
    shared = [plan.grids[each.name] for each in encoders(plan) if each.shared]
    own = [grid for grid in plan.grids.values() if grid not in shared]
    cells = [cell for grid in own for cell in _cells(plan, grid, shared)]
    columns = min(plan.hardware.gpus_per_node, plan.world_size)
    return [list(node) for node in batched(cells, columns)]


def _cells(plan: Plan, grid: Grid, shared: list[Grid]) -> Iterator[Cell]:
    """The ranks of one module, with those that run on some of them; its stages have the colours
    behind those of modules before it."""
    parallel = grid.parallel
    here = [grid, *(other for other in shared if other.first in grid.ranks)]
    member: dict[int, list[str]] = {rank: [] for rank in grid.ranks}
    for module, kind, groups in ((each.name, *of) for each in here for of in each.groups.items()):
        for index, group in enumerate(groups):
            for rank in group:
                member[rank].append(f"{kind}:{'' if module == 'llm' else module}{index}")
    axes = [axis for axis in ("tp", "cp", "dp", "pp", "ep") if getattr(parallel, axis) > 1]
    axes += ["etp"] * (parallel.etp_size not in (1, parallel.tp))
    before = sum(g.parallel.pp for g in plan.grids.values() if g.first < grid.first)
    for each in map(grid.place, grid.ranks):
        names = [of.name for of in here if each.rank in of.ranks] if len(plan.grids) > 1 else []
        places = [*names, *(f"{axis}{getattr(each, axis)}" for axis in axes)]
        yield Cell(each.rank, places, member[each.rank], (before + each.pp) % SERIES)


def groups_table(plan: Plan) -> Table | None:
    """The process groups in words; None for one rank."""
    rows = [
        (
            code(kind if grid.name == "llm" else f"{kind} of {grid.name}"),
            f"{len(groups)} of {len(groups[0])} ranks",
            _examples(groups),
            MEANINGS[kind],
        )
        for grid in plan.grids.values()
        for kind, groups in grid.groups.items()
    ]
    head = ("group", "how many", "which ranks", "its ranks")
    return Table(head, rows, "Groups of ranks") if rows else None


def _examples(groups: tuple[tuple[int, ...], ...], most: int = 4) -> str:
    """The first groups and the last one."""
    if len(groups) <= most:
        return " | ".join(map(_members, groups))
    return " | ".join([*map(_members, groups[: most - 1]), "…", _members(groups[-1])])


def _members(group: tuple[int, ...]) -> str:
    """Rising ranks with a constant stride: 0-3, or 0, 8, … 56."""
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) > 4 and len({b - a for a, b in pairwise(group)}) == 1:
        return f"{group[0]}, {group[1]}, … {group[-1]}"
    return ", ".join(map(str, group))


# Layers and pipeline ----------------------------------------------------------------------------

PARTS = {
    "embedding": ("series-3", "embedding"),
    "dense": ("series-1", "dense layer"),
    "sparse": ("series-6", "layer with routed experts"),
    "mtp": ("series-4", "multi-token-prediction layer"),
    "loss": ("series-5", "output projection and loss"),
}


def layers_chart(plan: Plan) -> Chart:
    """Stages as rows and chunks as columns, one square for each layer."""
    pp = plan.parallel.pp
    vpp = plan.parallel.vpp_size
    left = 70
    first = 22
    step = 44
    height = 22
    column = (WIDTH - left) / vpp
    most = max(len(_parts(plan, chunk)) for stage in plan.stages for chunk in stage)
    width = min(64.0, (column - 16) / most)
    shapes: list[Shape] = [Text(left + i * column, 14, f"chunk {i}", "quiet") for i in range(vpp)]
    used = set()
    for rank, stage in enumerate(plan.stages):
        top = first + rank * step
        shapes.append(Text(0, top + 15, f"stage {rank}"))
        for number, chunk in enumerate(stage):
            x = left + number * column
            for i, (kind, label) in enumerate(_parts(plan, chunk)):
                class_, words = PARTS[kind]
                title = f"{words} {label}" if label.isdigit() else words
                box = Box(x + i * width, top, width - 1, height, title, class_, label)
                shapes.append(box)
                used.add(kind)
            words = f"{count(chunk_parameters(plan, chunk).total)} parameters"
            if chunk.layers:
                plural = "s" if len(chunk.layers) > 1 else ""
                words = f"layer{plural} {ranges(chunk.layers)}, {words}"
            shapes.append(Text(x, top + height + 13, words, "quiet small"))
    title = f"Parts of the model on {pp} stages of {vpp} chunks"
    legend = [PARTS[kind] for kind in PARTS if kind in used]
    if more := _encoder_shapes(plan, first + pp * step, left, height, step):
        shapes += more
        legend += [("series-2", "layer of an encoder")]
    rows = pp + sum(len(each.layers) for each in encoders(plan))
    return Chart(title, first + rows * step, shapes, legend)


def _encoder_shapes(plan: Plan, top: float, left: float, height: float, step: float) -> list[Shape]:
    """A row for each pipeline stage of each encoder."""
    shapes: list[Shape] = []
    names = {"patches": ("series-3", "P"), "merger": ("series-5", "M")}
    for each in encoders(plan):
        width = min(64.0, (WIDTH - left - 16) / (max(each.layers) + 2))
        for stage, layers in enumerate(each.stage_layers):
            shapes.append(Text(0, top + 15, f"{each.name} {stage}"))
            boxes = [(f"layer {i}", "series-2", str(i)) for i in layers]
            more = [(part, *names[part]) for part in each.besides(stage)]
            boxes = [m for m in more if m[0] == "patches"] + boxes
            boxes += [m for m in more if m[0] == "merger"]
            for i, (title, class_, label) in enumerate(boxes):
                x = left + i * width
                shapes.append(Box(x, top, width - 1, height, title, class_, label))
            words = f"{count(each.parameters(stage).total)} parameters"
            shapes.append(Text(left, top + height + 13, words, "quiet small"))
            top += step
    return shapes


def _parts(plan: Plan, chunk: ModelChunk) -> list[tuple[str, str]]:
    """(kind, label) of everything in a chunk, in the order it runs."""
    routed = set(plan.router_layers)
    parts = [("embedding", "E")] if chunk.embedding else []
    parts += [("sparse" if layer in routed else "dense", str(layer)) for layer in chunk.layers]
    parts += [("mtp", "M")] * chunk.mtp
    return [*parts, ("loss", "L")] if chunk.loss else parts


MOST_UNITS = 140
"""Forward passes next to each other that can still be told apart."""

SHADES = 4


def pipeline_chart(plan: Plan) -> tuple[str, Chart] | None:
    """(words, schedule) of one minibatch, with the first encoder; None for one stage."""
    pp = plan.parallel.pp
    vpp = plan.parallel.vpp_size
    if num_stages(plan) == 1:
        return None
    # the backward pass computes two products where the forward pass computes one
    backward = 3.0 if plan.model.recompute == "full" else 2.0
    # an interleaved schedule runs whole rounds of pp microbatches
    whole = pp if vpp > 1 else 1
    rounds = update_rounds(plan)[0]
    run = -(-len(rounds) // whole) * whole
    readable = int(MOST_UNITS / (vpp * (1 + backward)))
    drawn = min(run, max(pp, readable // whole * whole))
    encoder = next(iter(encoders(plan)), None)
    more = ""
    ahead = None
    if encoder:
        gpu = gpu_of(plan)
        pace = 1.0
        if gpu:
            theirs, ours = Passes(plan, gpu).pace(encoder, rounds)
            pace = theirs * vpp / ours
        again = backward * pace if encoder.module.train else None
        stages = 0 if encoder.shared else encoder.parallel.pp
        ahead = Ahead(stages, ahead_of(plan.parallel.pp, plan.parallel.vpp), pace, again)
        more = f" A stage of {encoder.name} takes {pace:.2g} of it."
        if encoder.shared:
            more = f" Stage 0 takes {pace:.2g} more of it for {encoder.name}."
    slots, all_slots = (
        pipeline(pp, vpp, number, 1.0, backward, encoder=ahead) for number in (drawn, run)
    )
    words = (
        f"{run} microbatches of the first minibatch, at the lengths of estimate: ranks wait "
        f"{bubble_share(all_slots):.1%} of the time. A backward pass takes {backward:g} forward "
        f"passes{' (recompute full)' if backward == 3 else ''}, and all chunks "
        f"take the same. Time counts forward passes of a chunk.{more}"
    )
    if drawn < run:
        words += f" Drawn with {drawn} of them."
    return words, _schedule(slots, pp, vpp, encoder.name if encoder else "")


def _schedule(slots: list[Slot], pp: int, vpp: int, encoder: str) -> Chart:
    left = 70
    top = 30
    step = 26
    end = max(slot.end for slot in slots)
    first = min(slot.rank for slot in slots)
    ours = {rank: f"stage {rank}" for rank in range(pp)}
    names = {rank: f"{encoder} {rank - first}" for rank in range(first, 0)} | ours
    scale = (WIDTH - left - 20) / end
    height = top + step * len(names)
    shapes = axis(end, "", left, scale, top, height, about=10)
    shapes += [Text(0, top + i * step + 14, name) for i, name in enumerate(names.values())]
    for slot in slots:
        kind = "forward" if slot.kind == "F" else "backward"
        title = f"{names[slot.rank]}, chunk {slot.chunk}, microbatch {slot.microbatch}: {kind}"
        x = left + slot.start * scale
        width = slot.end - slot.start
        y = top + (slot.rank - first) * step
        class_ = f"{kind} shade-{slot.chunk % SHADES}"
        shapes.append(Box(x, y, width * scale, 20, title, class_, str(slot.microbatch)))
    title = "Pipeline schedule: microbatches by stage over time, in forward passes of one chunk"
    more = ", and so on" if vpp > SHADES else ""
    legend = [
        (f"{kind} shade-{i}", kind if vpp == 1 else f"{kind}, chunk {i}{more if i == 3 else ''}")
        for kind in ("forward", "backward")
        for i in range(min(vpp, SHADES))
    ]
    return Chart(title, height, shapes, legend)


# Memory -----------------------------------------------------------------------------------------


def memory_chart(summary: Summary, host: bool) -> tuple[Chart, str]:
    """Bars of the device's memory or of the host's, and a remark."""
    stages = summary.memory
    limit = None if host else summary.limit
    most = max(stage.held(phase, host) for stage in stages for phase in stage.phases)
    bars = []
    for items, equal in groupby(stages, lambda stage: [i for i in stage.items if i.host == host]):
        numbers = tuple(stage.stage for stage in equal)
        group = f"stage {ranges(numbers)}" if len(stages) > 1 else ""
        if (module := stages[numbers[0]].module) != "llm":
            group += f" ({module})"
        for phase in stages[numbers[0]].phases:
            parts = [_memory_part(item) for item in items if phase in item.phases]
            if parts:
                total = size(stages[numbers[0]].held(phase, host))
                bars.append(Bar(group, phase, parts, total))
    names = dict.fromkeys(item.name for stage in stages for item in stage.items)
    where = "host" if host else "device"
    title = f"Bytes of the fullest rank's {where} memory by stage and phase"
    if limit is None:
        return stacked_bars(title, bars, unit_for(most), names), ""
    if limit > 6 * most:  # at this scale the bars would be too short to see
        remark = f"The limit, {size(limit)}, is far right of the picture."
        return stacked_bars(title, bars, unit_for(most), names), remark
    line = (limit, f"limit {size(limit)}")
    return stacked_bars(title, bars, unit_for(max(most, limit)), names, line), ""


def _memory_part(item: Item) -> Part:
    title = f"{item.name}: {size(item.bytes)}, {item.why}"
    return Part(item.name, item.bytes, title, not item.exact)


def memory_tables(summary: Summary) -> list[Table]:
    """Items by stage and totals by phase, eight stages a table; then how bytes are counted."""
    tables = [_memory_table(summary, stages) for stages in batched(summary.memory, 8)]
    stage = summary.fullest
    rows = [(item.name, "counted" if item.exact else "estimated", item.why) for item in stage.items]
    caption = f"How bytes are counted ({stage.name})"
    return [*tables, Table(("item", "is", "how"), rows, caption, "plain")]


def _memory_table(summary: Summary, stages: tuple[StageMemory, ...]) -> Table:
    limit = summary.limit
    unit, factor = unit_for(max(limit or 0, summary.fullest.peak))
    kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}  # (name, phases) -> bytes by stage
    for i, stage in enumerate(stages):
        for item in stage.items:
            name = f"{'' if item.exact else '≈ '}{item.name}{' (host)' if item.host else ''}"
            kinds.setdefault((name, item.phases), [0] * len(stages))[i] += item.bytes
    rows: list[tuple[str, ...]] = []
    for (name, phases), held in kinds.items():
        when = "every phase" if len(phases) == len(stages[0].phases) else ", ".join(phases)
        when = "every phase of a step" if phases == MEMORY_PHASES != stages[0].phases else when
        rows.append((name, when, *(in_units(each, factor) for each in held)))
    for phase in stages[0].phases:
        held = [in_units(stage.held(phase), factor) for stage in stages]
        rows.append((Markup("<b>together</b>"), phase, *held))
    if limit is not None:
        left = [in_units(limit - stage.peak, factor) for stage in stages]
        rows.append((Markup("<b>headroom</b>"), f"of {size(limit)}", *left))
    columns = [stage.name for stage in stages]
    head = ("item", "held in", *(columns if len(summary.memory) > 1 else [unit]))
    return Table(head, rows, f"{unit} of the fullest rank (≈ estimated)", "numbers")


# Time -------------------------------------------------------------------------------------------


def time_chart(time: StepTime) -> Chart:
    """Bars of seconds by phase."""
    bars = []
    for phase in dict.fromkeys(cost.phase for cost in time.costs):
        parts = [_time_part(cost) for cost in time.costs if cost.phase == phase]
        bars.append(Bar("", phase, parts, duration(time.seconds(phase))))
    names = dict.fromkeys(cost.name for cost in time.costs)
    return stacked_bars("Seconds of a step by phase", bars, ("s", 1.0), names)


def _time_part(cost: Cost) -> Part:
    title = f"{cost.phase}: {cost.name}, {duration(cost.seconds)}, {cost.why}"
    return Part(cost.name, cost.seconds, title)


def time_table(time: StepTime) -> Table:
    """Every cost, with what it assumes."""
    rows = [
        (each.phase, each.name, amount(each.amount, each.unit), duration(each.seconds), each.why)
        for each in time.costs
    ]
    head = ("phase", "what", "how much", "time", "assumed")
    return Table(head, rows, "Estimated time of a step", "costs")
