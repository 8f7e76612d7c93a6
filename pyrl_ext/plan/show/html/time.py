"""The page's pictures of time: the pipeline's schedule, and the seconds of a step by phase."""

from __future__ import annotations

from pyrl_ext.plan.forecast.pipeline_schedule import Slot, bubble_share, pipeline
from pyrl_ext.plan.forecast.step_time import Cost
from pyrl_ext.plan.forecast.units import amount, duration
from pyrl_ext.plan.forecast.workload import update_rounds
from pyrl_ext.plan.show.html.bars import Part, Row, bars
from pyrl_ext.plan.show.html.svg import (
    WIDTH,
    Content,
    Markup,
    box,
    grid_lines,
    join,
    legend,
    picture,
    table,
    tag,
    text,
)
from pyrl_ext.plan.show.summary import Summary

_MOST_UNITS = 140  # forward passes beside each other that can still be told apart
_SHADES = 4


def pipeline_section(summary: Summary) -> Markup:
    """Who computes what when in one minibatch, and how long ranks wait."""
    plan, parallel = summary.plan, summary.plan.parallel
    pp, vpp = parallel.pp, parallel.vpp_size
    if pp == 1:
        return tag("p", "One stage: nothing waits for another stage, and there is no bubble.")
    # the backward pass computes two products where the forward pass computes one
    backward = 3.0 if plan.model.recompute == "full" else 2.0
    # interleaving runs whole rounds of pp microbatches
    whole = pp if vpp > 1 else 1
    run = -(-len(update_rounds(plan)[0]) // whole) * whole
    readable = int(_MOST_UNITS / (vpp * (1 + backward)))
    drawn = min(run, max(pp, readable // whole * whole))
    slots = pipeline(pp, vpp, drawn, 1.0, backward)
    bubble = bubble_share(slots if drawn == run else pipeline(pp, vpp, run, 1.0, backward))
    words = (
        f"{run} microbatches of the first minibatch, at the lengths of estimate: ranks wait "
        f"{bubble:.1%} of the time. A backward pass takes {backward:g} forward passes"
        f"{' (recompute full)' if backward == 3 else ''}, and all chunks "
        "take the same. Time counts forward passes of a chunk."
    )
    if drawn < run:
        words += f" Drawn with {drawn} of them."
    return join((tag("p", words), legend(_kinds(vpp)), _schedule(slots, pp)))


def _kinds(vpp: int) -> list[tuple[str, str]]:
    shades = range(min(vpp, _SHADES))
    again = ", and so on" if vpp > _SHADES else ""
    return [
        (f"{kind} shade-{i}", words if vpp == 1 else f"{words}, chunk {i}{again if i == 3 else ''}")
        for kind, words in (("forward", "forward"), ("backward", "backward"))
        for i in shades
    ]


def _schedule(slots: list[Slot], pp: int) -> Markup:
    left, top, row, bar = 70, 30, 26, 20
    end = max(slot.end for slot in slots)
    scale, height = (WIDTH - left - 20) / end, top + row * pp
    shapes: list[Content] = [grid_lines(end, "", left, scale, top, height, about=10)]
    shapes += [text(0, top + rank * row + 14, f"stage {rank}") for rank in range(pp)]
    for slot in slots:
        kind = "forward" if slot.kind == "F" else "backward"
        title = f"stage {slot.rank}, chunk {slot.chunk}, microbatch {slot.microbatch}: {kind}"
        x, y, width = left + slot.start * scale, top + slot.rank * row, slot.end - slot.start
        class_ = f"{kind} shade-{slot.chunk % _SHADES}"
        shapes.append(box(x, y, width * scale, bar, title, class_, str(slot.microbatch)))
    title = "Pipeline schedule: microbatches by stage over time, in forward passes of one chunk"
    return picture(height, title, shapes)


def time_section(summary: Summary) -> Markup:
    """Bars of seconds by phase, and every cost with what it assumes."""
    time = summary.time
    if time is None:
        return tag("p", "hardware.gpu names no GPU, so no time is estimated.")
    rows = []
    for phase in dict.fromkeys(cost.phase for cost in time.costs):
        parts = [_part(cost) for cost in time.costs if cost.phase == phase]
        rows.append(Row("", phase, parts, duration(time.seconds(phase))))
    costs = [
        (each.phase, each.name, amount(each.amount, each.unit), duration(each.seconds), each.why)
        for each in time.costs
    ]
    head = ("phase", "what", "how much", "time", "assumed")
    numbers = table(head, costs, "Estimated time of a step", "costs")
    names = list(dict.fromkeys(cost.name for cost in time.costs))
    drawn = bars("Seconds of a step by phase", rows, names, ("s", 1.0))
    assumed = [tag("li", sentence) for sentence in (*time.assumed, time.error)]
    return join((drawn, tag("ul", assumed, class_="remarks"), numbers))


def _part(cost: Cost) -> Part:
    title = f"{cost.phase}: {cost.name}, {duration(cost.seconds)}, {cost.why}"
    return Part(cost.name, cost.seconds, title)
