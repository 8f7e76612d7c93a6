"""The page's picture of memory: stacked bars by stage and phase, and a table of the same bytes."""

from __future__ import annotations

from itertools import batched, groupby

from pyrl_ext.plan.forecast.memory import Item, StageMemory
from pyrl_ext.plan.forecast.phases import MEMORY_PHASES
from pyrl_ext.plan.forecast.units import in_units, size, unit_for
from pyrl_ext.plan.show.html.bars import Limit, Part, Row, bars
from pyrl_ext.plan.show.html.svg import Content, Markup, join, table, tag
from pyrl_ext.plan.show.summary import Summary, ranges

_STAGES = 8  # a table holds


def memory_section(summary: Summary) -> Markup:
    """Bars of the device, of the host where it holds something, and all numbers."""
    parts = [_bars(summary, host=False)]
    if any(item.host and item.bytes for stage in summary.memory for item in stage.items):
        parts += [tag("h3", "In the host's memory, for each rank"), _bars(summary, host=True)]
    return join((*parts, _numbers(summary), _reasons(summary)))


def _bars(summary: Summary, host: bool) -> Markup:
    stages, limit = summary.memory, None if host else summary.limit
    most = max(stage.held(phase, host) for stage in stages for phase in MEMORY_PHASES)
    rows = []
    for items, alike in groupby(stages, lambda stage: [i for i in stage.items if i.host == host]):
        numbers = tuple(stage.stage for stage in alike)
        group = f"stage {ranges(numbers)}" if len(stages) > 1 else ""
        for phase in MEMORY_PHASES:
            parts = [_part(item) for item in items if phase in item.phases]
            if parts:
                rows.append(Row(group, phase, parts, size(stages[numbers[0]].held(phase, host))))
    # a device with far more room than is used would leave nothing to see
    is_far = limit is not None and limit > 6 * most
    shown = Limit(limit, f"limit {size(limit)}") if limit is not None and not is_far else None
    names = dict.fromkeys(item.name for stage in stages for item in stage.items)
    where = "host" if host else "device"
    title = f"Bytes of the fullest rank's {where} memory by stage and phase"
    far = f"The limit, {size(limit or 0)}, is far right of the picture."
    picture = bars(
        title, rows, list(names), unit_for(max(most, shown.amount if shown else 0)), shown
    )
    return join((picture, tag("p", far) if is_far else ""))


def _part(item: Item) -> Part:
    return Part(
        item.name, item.bytes, f"{item.name}: {size(item.bytes)}, {item.why}", not item.exact
    )


def _numbers(summary: Summary) -> Markup:
    """Items by stage, and what they come to in every phase; so many stages a table as fit."""
    return join(_table_of(summary, stages) for stages in batched(summary.memory, _STAGES))


def _table_of(summary: Summary, stages: tuple[StageMemory, ...]) -> Markup:
    limit = summary.limit
    unit, factor = unit_for(max(limit or 0, summary.fullest.peak))
    kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}  # (name, phases) -> bytes by stage
    for i, stage in enumerate(stages):
        for item in stage.items:
            name = f"{'' if item.exact else '≈ '}{item.name}{' (host)' if item.host else ''}"
            kinds.setdefault((name, item.phases), [0] * len(stages))[i] += item.bytes
    rows: list[list[Content]] = []
    for (name, phases), held in kinds.items():
        when = "every phase" if len(phases) == len(MEMORY_PHASES) else ", ".join(phases)
        rows.append([name, when, *(in_units(each, factor) for each in held)])
    for phase in MEMORY_PHASES:
        held = [in_units(stage.held(phase), factor) for stage in stages]
        rows.append([tag("b", "together"), phase, *held])
    if limit is not None:
        left = [in_units(limit - stage.peak, factor) for stage in stages]
        rows.append([tag("b", "headroom"), f"of {size(limit)}", *left])
    columns = [f"stage {stage.stage}" for stage in stages]
    head = ("item", "held in", *(columns if len(summary.memory) > 1 else [unit]))
    return table(head, rows, f"{unit} of the fullest rank (≈ estimated)", "numbers")


def _reasons(summary: Summary) -> Markup:
    stage = summary.fullest
    rows = [(item.name, "counted" if item.exact else "estimated", item.why) for item in stage.items]
    caption = f"How bytes are counted (stage {stage.stage})"
    return table(("item", "is", "how"), rows, caption, "plain")
