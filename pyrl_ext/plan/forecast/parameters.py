"""Parameters of a pipeline stage, of a model chunk, of one rank, and of a weight sync."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.counts import (
    Parameters,
    embedding_parameters,
    head_parameters,
    layers,
    mtp_parameters,
    parameters,
    whole_projections,
)
from pyrl_ext.plan.model.freeze import ROUTER_BIAS, layer_of
from pyrl_ext.plan.model.layer_kinds import LayerKind
from pyrl_ext.plan.model.lora import Linear, adapted, factors
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.plan.plan import Plan


class RankParameters(NamedTuple):
    """Parameters on one rank; routed experts have ranks and copies unlike the rest."""

    dense: int
    """Outside of routed experts."""
    expert: int
    """In routed experts."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stage_parameters(plan: Plan) -> list[Parameters]:
    """Parameters of each pipeline stage."""
    return [_of_stage(plan, stage, chunk_parameters) for stage in range(plan.parallel.pp)]


def _of_stage(
    plan: Plan, stage: int, counted: Callable[[Plan, ModelChunk], Parameters]
) -> Parameters:
    return sum((counted(plan, chunk) for chunk in plan.stages[stage]), Parameters())


def chunk_parameters(plan: Plan, chunk: ModelChunk) -> Parameters:
    """Parameters that one model chunk stores: a weight that two stages share is counted in each,
    and the vocabulary is padded to a multiple of tp."""
    sizes = plan.sizes
    of_layer = layers(sizes)
    total = sum((of_layer[index] for index in chunk.layers), Parameters())
    for _ in range(chunk.mtp):
        total += mtp_parameters(sizes)
    reads_tokens = chunk.embedding or chunk.mtp > 0
    tables = int(reads_tokens)
    if chunk.loss:
        total += head_parameters(sizes)
        tables += not (sizes.tie_word_embeddings and reads_tokens)
    if reads_tokens or (chunk.loss and sizes.tie_word_embeddings):
        total += embedding_parameters(sizes)
    padding = -sizes.vocab_size % plan.parallel.tp
    return total + Parameters(tensor=tables * padding * sizes.hidden_size)


def adapters(plan: Plan, kinds: Iterable[LayerKind]) -> Iterator[tuple[Linear, int]]:
    """(linear, rank of its adapter) of layers of such kinds, layer by layer."""
    lora = plan.lora
    if lora is None:
        return
    for kind in kinds:
        for linear in adapted(plan.sizes, lora, kind):
            yield linear, lora.rank_of(linear.experts > 0)


def trained_parameters(plan: Plan, chunk: ModelChunk) -> Parameters:
    """Parameters of one model chunk that have gradients: all but those that `model.freeze` names,
    or those of adapters alone.

    A factor of a routed expert that expert-tensor-parallel ranks do not split is counted once for
    each of them, so that `rank_parameters` gives the part of a rank.
    """
    if plan.lora is None:
        stored = chunk_parameters(plan, chunk)
        frozen = frozen_parameters(plan, chunk)
        return Parameters(
            replicated=stored.replicated - frozen.replicated,
            tensor=stored.tensor - frozen.tensor,
            expert=stored.expert - frozen.expert,
        )
    total = Parameters()
    for kind, number in Counter(plan.sizes.kinds_in(chunk)).items():
        for factor in factors(plan.sizes, plan.lora, kind):
            count = number * factor.numbers * factor.tensors
            if factor.experts:
                copied = 1 if factor.cut else plan.parallel.etp_size
                total += Parameters(expert=count * copied)
            elif factor.cut:
                total += Parameters(tensor=count)
            else:
                total += Parameters(replicated=count)
    return total


def frozen_parameters(plan: Plan, chunk: ModelChunk) -> Parameters:
    """Parameters of one model chunk that `model.freeze` names, counted as in `chunk_parameters`."""
    total = Parameters()
    if not plan.frozen:
        return total
    for row in rows_of(plan, chunk):
        if row.megatron_name in plan.frozen:
            total += _row_parameters(plan, row)
    return total


def rows_of(plan: Plan, chunk: ModelChunk) -> Iterator[Weight]:
    """The rows of the weight table that one model chunk holds, copies included."""
    layers = {*chunk.layers, *(plan.sizes.num_hidden_layers + i for i in range(chunk.mtp))}
    tied = plan.sizes.tie_word_embeddings
    outside = {
        "embedding": chunk.embedding or chunk.mtp > 0 or (chunk.loss and tied),
        "output_layer": chunk.loss,
        "decoder.final_layernorm": chunk.loss,
        "mtp": chunk.mtp > 0,
    }
    held = tuple(start for start, is_held in outside.items() if is_held)
    for row in plan.sizes.weights(plan.num_mtp_layers):
        layer = layer_of(row)
        if layer in layers or (layer is None and row.megatron_name.startswith(held)):
            yield row


def _row_parameters(plan: Plan, row: Weight) -> Parameters:
    """The numbers of one row of the weight table; the routers' bias is none of the parameters."""
    number = sum(math.prod(shape) for shape in row.shapes)
    if row.megatron_name.endswith(ROUTER_BIAS):
        return Parameters()
    if row.expert is not None:
        return Parameters(expert=number)
    if row.shard == "same":
        return Parameters(replicated=number)
    if row.shard == "vocab":
        number += -plan.sizes.vocab_size % plan.parallel.tp * plan.sizes.hidden_size
    return Parameters(tensor=number)


def trained_of_stage(plan: Plan, stage: int) -> Parameters:
    """The `trained_parameters` of one pipeline stage, its interleaved chunks added up."""
    return _of_stage(plan, stage, trained_parameters)


def held_on_rank(plan: Plan, stage: int) -> int:
    """Parameters that one rank of a stage holds, with those of adapters."""
    base = rank_parameters(plan, _of_stage(plan, stage, chunk_parameters)).total
    if plan.lora is None:
        return base
    return base + rank_parameters(plan, trained_of_stage(plan, stage)).total


def rank_parameters(plan: Plan, stored: Parameters) -> RankParameters:
    """The part of `stored` that one rank holds."""
    parallel = plan.parallel
    dense = stored.replicated + -(-stored.tensor // parallel.tp)
    return RankParameters(dense, -(-stored.expert // (parallel.ep * parallel.etp_size)))


def copies(plan: Plan) -> tuple[int, int]:
    """Ranks that hold the same dense parameters, and ranks that hold the same routed experts."""
    parallel = plan.parallel
    experts = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    return parallel.dp * parallel.cp, max(1, experts)


def optimizer_parameters(plan: Plan, stored: Parameters) -> int:
    """Parameters of `stored` whose optimizer state one rank holds."""
    on_rank = rank_parameters(plan, stored)
    if not plan.optimizer.distributed:
        return on_rank.total
    return sum(-(-number // ranks) for number, ranks in zip(on_rank, copies(plan), strict=True))


# Weight sync -------------------------------------------------------------------------------------


class Published(NamedTuple):
    """Size of a weight sync: number of tensors, and of the elements in them."""

    tensors: int = 0
    numbers: int = 0

    def __add__(self, other: Published) -> Published:  # type: ignore[override]
        return Published(self.tensors + other.tensors, self.numbers + other.numbers)


def engine_parameters(plan: Plan) -> Parameters:
    """Parameters of the language model in an engine, with the MTP layers that draft tokens."""
    total = parameters(plan.sizes)
    for _ in range(plan.draft_layers):
        total += mtp_parameters(plan.sizes)
    return total


def quantized_parameters(plan: Plan) -> int:
    """Elements of the matrices that an engine holds in 8 bits, if `rollout.quantization` asks for
    it: those of decoder layers but for routers. Biases, which few families have, are counted as
    well, and so is the projection of MTP layers."""
    sizes = plan.sizes
    if plan.rollout.quantization is None:
        return 0
    total = engine_parameters(plan)
    outside = embedding_parameters(sizes) + head_parameters(sizes)
    attending = sum(kind.mixer == "attention" for kind in sizes.layer_kinds) + plan.draft_layers
    whole = attending * whole_projections(sizes)
    return total.expert + total.tensor - outside.tensor + whole


def quantized_matrices(plan: Plan) -> int:
    """Matrices that vLLM quantizes on a rank in each weight sync: of an expert two, since those of
    gate and up projections are one, and of the rest of a layer about five."""
    sizes = plan.sizes
    experts = 0
    if sizes.router_layers:
        experts = (len(sizes.router_layers) + plan.draft_layers) * _experts_on_rank(plan)
    return 2 * experts + 5 * (sizes.num_hidden_layers + plan.draft_layers)


def _experts_on_rank(plan: Plan) -> int:
    """Experts of a layer of which a rank of vLLM's engine has a part."""
    experts = plan.sizes.num_experts
    if plan.rollout.engine_options.get("enable_expert_parallel"):
        return experts // plan.rollout.tp
    return experts


def published_factors(plan: Plan) -> Published:
    """All factors that the engine may get: it has no use for those of MTP layers."""
    sizes = plan.sizes
    total = Published()
    if plan.lora is None:
        return total
    for kind, number in Counter(sizes.layer_kinds).items():
        for factor in factors(sizes, plan.lora, kind):
            tensors = number * factor.tensors
            total += Published(tensors, tensors * factor.numbers)
    return total


def published(plan: Plan) -> Published:
    """Size of every weight sync but the first. It sends all trained weights, or the adapters'
    factors, or the weights that adapters change. vLLM fuses the tensors of a layer, so it gets the
    whole layer if one of them changes."""
    sizes = plan.sizes
    tensors = sizes.num_tensors
    if plan.draft_layers:
        tensors += plan.draft_layers * sizes.num_mtp_tensors
    every = Published(tensors, engine_parameters(plan).total)
    if plan.lora_publish == "adapter":
        return published_factors(plan) + every if plan.sends_all else published_factors(plan)
    if plan.sends_all:
        return every
    if plan.lora is None:
        kept = _unchanged(plan)
        return Published(every.tensors - kept.tensors, every.numbers - kept.numbers)
    if plan.rollout.engine == "vllm":
        outside = embedding_parameters(sizes).total + head_parameters(sizes).total
        return Published(every.tensors - sizes.num_tensors_outside, every.numbers - outside)
    total = Published()
    for linear, _ in adapters(plan, sizes.layer_kinds):
        tensors = max(1, linear.experts)
        total += Published(tensors, tensors * linear.inputs * linear.outputs)
    return total


def loaded_tensors(plan: Plan) -> int:
    """Tensors that the engine's loader gets in every weight sync but the first: vLLM's gets the
    experts of a layer as one tensor of each kind (`ExpertStacks`)."""
    sizes = plan.sizes
    sent = published(plan).tensors
    if plan.rollout.engine != "vllm" or plan.lora_publish == "adapter" or not sizes.router_layers:
        return sent
    every = sizes.num_tensors + plan.draft_layers * sizes.num_mtp_tensors
    layers = len(sizes.router_layers) + plan.draft_layers
    # those of other ranks come one by one, and are dropped
    together = layers * sizes.mlp_matrices * (_experts_on_rank(plan) - 1)
    return round(sent * (every - together) / every)


def _unchanged(plan: Plan) -> Published:
    """Frozen weights that a weight sync leaves out after the first one."""
    table = plan.sizes.weights(plan.draft_layers)
    changing = {layer_of(row) for row in table if row.megatron_name not in plan.frozen} - {None}
    total = Published()
    for row in table:
        fused = plan.rollout.engine == "vllm" and layer_of(row) in changing
        if row.megatron_name in plan.frozen and not fused:
            total += Published(len(row.hf_names), _row_parameters(plan, row).total)
    return total
