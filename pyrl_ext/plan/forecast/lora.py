"""Adapters in the forecast: their work in a pass, and what a publish sends of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pyrl_ext.plan.forecast.hardware import Gpu
from pyrl_ext.plan.forecast.parts import Part, Work, reached
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.counts import embedding_parameters, head_parameters, parameters
from pyrl_ext.plan.model.lora import Linear, adapted, factors
from pyrl_ext.plan.plan import Plan


def _adapted(plan: Plan, chunk: ModelChunk) -> Iterator[tuple[Linear, int, int]]:
    """(linear, its adapter's rank, how often a row passes one of its kind) of a chunk."""
    sizes = plan.sizes
    lora = plan.lora
    if lora is None:
        return
    for kind, number in Counter(sizes.kinds_in(chunk)).items():
        for linear in adapted(sizes, lora, kind):
            times = number * (sizes.topk if linear.experts else 1)
            yield linear, lora.rank_of(linear.experts > 0), times


def whole_chunk(plan: Plan) -> ModelChunk:
    """The model as one chunk, with the MTP layers that are trained."""
    layers = tuple(range(plan.sizes.num_hidden_layers))
    return ModelChunk(True, layers, plan.num_mtp_layers, True)


def adapter_flops(plan: Plan, chunk: ModelChunk) -> float:
    """Operations of a forward pass's adapters for one row."""
    return sum(
        2 * times * rank * (each.inputs + each.outputs)
        for each, rank, times in _adapted(plan, chunk)
    )


def adapter_parts(
    plan: Plan, gpu: Gpu, chunk: ModelChunk, cp: int, work: Work, again: frozenset[str]
) -> list[Part]:
    """The adapters of a chunk: each reads its linear's input and adds to its output. The memory
    traffic of that bounds it until ranks are of hundreds, then its products do."""
    moved = products = 0.0
    for linear, rank, times in _adapted(plan, chunk):
        passes = 1 if work != "backward" else 2
        passes += ("experts" if linear.experts else "projections") in again
        through = linear.inputs + linear.outputs
        moved += times * passes * (through + 2 * rank + 2 * linear.outputs)
        products += times * passes * 2 * rank * through
    if not moved:
        return []
    each = DTYPE_BYTES[plan.model.dtype]
    ranks = plan.parallel.tp * cp
    traffic = reached("memory", gpu.bandwidth, "byte")
    rate = reached("projections", gpu.flops[plan.model.dtype])
    if each * moved / traffic[0] > products / rate[0]:
        return [Part("adapters", "byte", *traffic, row=each * moved / ranks)]
    return [Part("adapters", "FLOP", *rate, row=products / ranks)]


# publish -----------------------------------------------------------------------------------------


def factor_numbers(plan: Plan) -> int:
    """Numbers in all factors that the engine may get: those of MTP layers it has no use for."""
    sizes = plan.sizes
    lora = plan.lora
    if lora is None:
        return 0
    kinds = Counter(sizes.layer_kinds)
    return sum(
        number * factor.numbers * factor.tensors
        for kind, number in kinds.items()
        for factor in factors(sizes, lora, kind)
    )


def published_numbers(plan: Plan) -> int:
    """Numbers that a publish sends after the first one: of all weights, also where `Plan.sends_all`
    says so; of the adapters' factors; or of the weights that adapters change, for vLLM, which fuses
    them, of their whole layers."""
    sizes = plan.sizes
    lora = plan.lora
    total = parameters(sizes).total
    if plan.lora_publish == "adapter":
        return factor_numbers(plan) + total * plan.sends_all
    if lora is None or plan.sends_all:
        return total
    if plan.rollout.engine == "vllm":
        return total - embedding_parameters(sizes).total - head_parameters(sizes).total
    kinds = Counter(sizes.layer_kinds)
    return sum(
        number * each.inputs * each.outputs * max(1, each.experts)
        for kind, number in kinds.items()
        for each in adapted(sizes, lora, kind)
    )
