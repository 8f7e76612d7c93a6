"""Parameters of a pipeline stage, of a model chunk, and of one rank."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.counts import (
    Parameters,
    embedding_parameters,
    head_parameters,
    layers,
    mtp_parameters,
)
from pyrl_ext.plan.model.lora import factors
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
    return [parameters_of_stage(plan, stage) for stage in range(plan.parallel.pp)]


def parameters_of_stage(plan: Plan, stage: int) -> Parameters:
    """Parameters of one pipeline stage, its interleaved chunks added up."""
    return sum((chunk_parameters(plan, chunk) for chunk in plan.stages[stage]), Parameters())


def chunk_parameters(plan: Plan, chunk: ModelChunk) -> Parameters:
    """Parameters that one model chunk stores: a weight that two stages share is counted in each,
    and the vocabulary is padded to a multiple of tp."""
    sizes = plan.sizes
    total = Parameters()
    each = layers(sizes)
    for index in chunk.layers:
        total += each[index]
    for _ in range(chunk.mtp):
        total += mtp_parameters(sizes)
    tables = 0
    reads_tokens = chunk.embedding or chunk.mtp > 0
    if reads_tokens:
        total += embedding_parameters(sizes)
        tables += 1
    if chunk.loss:
        total += head_parameters(sizes)
        if not sizes.tie_word_embeddings:
            tables += 1
        elif not reads_tokens:  # tied weights on two stages are two copies
            total += embedding_parameters(sizes)
            tables += 1
    padding = -sizes.vocab_size % plan.parallel.tp
    return total + Parameters(tensor=tables * padding * sizes.hidden_size)


def trained_parameters(plan: Plan, chunk: ModelChunk) -> Parameters:
    """Parameters of one model chunk that have gradients: all, or those of adapters alone.

    A factor of a routed expert that expert-tensor-parallel ranks do not split is counted once for
    each of them, so that `rank_parameters` gives the part of a rank.
    """
    if plan.lora is None:
        return chunk_parameters(plan, chunk)
    whole = cut = expert = 0
    for kind, number in Counter(plan.sizes.kinds_in(chunk)).items():
        for factor in factors(plan.sizes, plan.lora, kind):
            held = number * factor.numbers * factor.tensors
            if factor.experts:
                expert += held * (1 if factor.cut else plan.parallel.etp_size)
            elif factor.cut:
                cut += held
            else:
                whole += held
    return Parameters(replicated=whole, tensor=cut, expert=expert)


def trained_of_stage(plan: Plan, stage: int) -> Parameters:
    """The `trained_parameters` of one pipeline stage, its interleaved chunks added up."""
    return sum((trained_parameters(plan, chunk) for chunk in plan.stages[stage]), Parameters())


def held_on_rank(plan: Plan, stage: int) -> int:
    """Parameters that one rank of a stage holds, with those of adapters."""
    held = rank_parameters(plan, parameters_of_stage(plan, stage)).total
    if plan.lora is not None:
        held += rank_parameters(plan, trained_of_stage(plan, stage)).total
    return held


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
    held = rank_parameters(plan, stored)
    if not plan.optimizer.distributed:
        return held.total
    return sum(-(-number // ranks) for number, ranks in zip(held, copies(plan), strict=True))
