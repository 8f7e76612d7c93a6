"""The page's map of layers: what every chunk of every pipeline stage holds."""

from __future__ import annotations

from pyrl_ext.plan.forecast.parameters import chunk_parameters
from pyrl_ext.plan.forecast.units import count
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.show.html.svg import WIDTH, Markup, box, join, legend, picture, text
from pyrl_ext.plan.show.summary import ranges

PARTS = {
    "embedding": ("series-3", "embedding"),
    "dense": ("series-1", "dense layer"),
    "sparse": ("series-6", "layer with routed experts"),
    "mtp": ("series-4", "multi-token-prediction layer"),
    "loss": ("series-5", "output projection and loss"),
}
_LEFT, _TOP, _ROW, _BAR, _WIDEST = 70, 22, 44, 22, 64


def stages_section(plan: Plan) -> Markup:
    """Stages as rows and chunks as columns; a square a layer."""
    pp, vpp = plan.parallel.pp, plan.parallel.vpp_size
    column = (WIDTH - _LEFT) / vpp
    most = max(len(_parts(plan, chunk)) for stage in plan.stages for chunk in stage)
    each = min(_WIDEST, (column - 16) / most)
    shapes = [text(_LEFT + i * column, 14, f"chunk {i}", "quiet") for i in range(vpp)]
    for rank, stage in enumerate(plan.stages):
        top = _TOP + rank * _ROW
        shapes.append(text(0, top + 15, f"stage {rank}"))
        for number, chunk in enumerate(stage):
            shapes.append(_chunk(plan, chunk, _LEFT + number * column, top, each))
    title = f"Parts of the model on {pp} stages of {vpp} chunks"
    used = {kind for stage in plan.stages for chunk in stage for kind, _ in _parts(plan, chunk)}
    colours = [PARTS[kind] for kind in PARTS if kind in used]
    return join((legend(colours), picture(_TOP + pp * _ROW, title, shapes)))


def _parts(plan: Plan, chunk: ModelChunk) -> list[tuple[str, str]]:
    """(kind, label) of everything in a chunk, in the order it runs."""
    routed = set(plan.router_layers)
    parts = [("embedding", "E")] if chunk.embedding else []
    parts += [("sparse" if layer in routed else "dense", str(layer)) for layer in chunk.layers]
    parts += [("mtp", "M")] * chunk.mtp
    return [*parts, ("loss", "L")] if chunk.loss else parts


def _chunk(plan: Plan, chunk: ModelChunk, left: float, top: float, width: float) -> Markup:
    shapes = []
    for i, (kind, label) in enumerate(_parts(plan, chunk)):
        class_, words = PARTS[kind]
        title = f"{words} {label}" if label.isdigit() else words
        shapes.append(box(left + i * width, top, width - 1, _BAR, title, class_, label))
    held = f"{count(chunk_parameters(plan, chunk).total)} parameters"
    several = "s" if len(chunk.layers) > 1 else ""
    words = f"layer{several} {ranges(chunk.layers)}, {held}" if chunk.layers else held
    return join((shapes, text(left, top + _BAR + 13, words, "quiet small")))
