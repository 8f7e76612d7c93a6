"""Layers that carry a state: what they save, move and exchange, and what engines keep of them."""

from __future__ import annotations

from pyrl_ext.plan.forecast.hardware import Gpu, group_rate
from pyrl_ext.plan.forecast.parts import Part, reached
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.plan import Plan

# Engines keep states in float32, whatever their weights are
STATE_BYTES = 4


def _state_layers(plan: Plan, chunk: ModelChunk) -> int:
    kinds = plan.sizes.layer_kinds
    return sum(kinds[layer].has_state for layer in chunk.layers)


def state_saved(plan: Plan) -> float:
    """Bytes that a mixer saves for a row on a rank, when nothing is recomputed: what the input
    projection makes, which convolution, scan and gate read; the convolution's output, which the
    scan reads; the scan's output; and the input of the output projection."""
    mixer = plan.sizes.state_mixer
    tp = plan.parallel.tp
    if mixer is None:
        return 0
    return DTYPE_BYTES[plan.model.dtype] * (mixer.inputs + mixer.convolved + 2 * mixer.inner) / tp


def state_scratch(plan: Plan) -> float:
    """Temporary bytes for a row in the backward pass of a mixer: gradients of what the scan and the
    convolution read, and of the scan's output."""
    mixer = plan.sizes.state_mixer
    if mixer is None:
        return 0
    each = DTYPE_BYTES[plan.model.dtype] * (mixer.inputs + mixer.convolved + mixer.inner)
    return each / plan.parallel.tp


def state_elements(plan: Plan, chunk: ModelChunk) -> float:
    """Elements of a row that the mixers of a chunk read and write between matrix products: before
    and behind the convolution and the scan, and in the gated norm."""
    mixer = plan.sizes.state_mixer
    if mixer is None:
        return 0
    return _state_layers(plan, chunk) * (3 * mixer.convolved + 4 * mixer.inner)


def state_exchange(
    plan: Plan, gpu: Gpu, cp: int, chunk: ModelChunk, again: frozenset[str]
) -> list[Part]:
    """Context-parallel ranks exchange rows for heads before the convolution, and back behind the
    scan: an all-to-all each way, in which a rank sends what it has of its rows."""
    mixer = plan.sizes.state_mixer
    number = _state_layers(plan, chunk)
    if mixer is None or not number:
        return []
    parallel = plan.parallel
    times = 1 + ("projections" in again)
    rows = DTYPE_BYTES[plan.model.dtype] * (mixer.inputs + mixer.inner) / parallel.tp / cp
    rate = group_rate(gpu, plan.hardware.gpus_per_node, cp, parallel.tp)
    row = number * times * rows * (cp - 1) / cp
    return [Part("heads for rows", "byte", *reached("exchange", rate, "byte"), row=row)]


def state_bytes(plan: Plan, tp: int) -> int:
    """Bytes that an engine keeps for one sequence on each of its `tp` GPUs, however long it is:
    the state of every such layer, and the last inputs of its convolution."""
    mixer = plan.sizes.state_mixer
    kinds = plan.sizes.layer_kinds
    if mixer is None:
        return 0
    taps = DTYPE_BYTES[plan.rollout_dtype] * mixer.convolved * (mixer.taps - 1)
    layers = sum(kind.has_state for kind in kinds)
    return layers * -(-(STATE_BYTES * mixer.state + taps) // tp)
