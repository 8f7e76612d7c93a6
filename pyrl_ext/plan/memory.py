"""Bytes that weights, optimizer and logits take on a rank."""

from __future__ import annotations

from dataclasses import dataclass

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.shape import (
    Parameters,
    embedding_parameters,
    head_parameters,
    layer_parameters,
    mtp_parameters,
)
from pyrl_ext.plan.stages import Stage

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the fullest rank that stay for the whole run; activations come on top."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    """Copy of the initial weights, kept where `objective.kl_coef` is above 0."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.reference


def stage_parameters(plan: Plan) -> list[Parameters]:
    """Parameters of each pipeline stage, with interleaved chunks put together."""
    return [
        sum((chunk_parameters(plan, chunk) for chunk in stage), Parameters())
        for stage in plan.stages
    ]


def chunk_parameters(plan: Plan, chunk: Stage) -> Parameters:
    """Parameters of one model chunk, with its copies of what other stages hold as well."""
    shape, total = plan.shape, Parameters()
    for layer in chunk.layers:
        total += layer_parameters(shape, layer)
    for _ in range(chunk.mtp):
        total += mtp_parameters(shape)
    if chunk.embedding or chunk.mtp:
        total += embedding_parameters(shape)
    if chunk.loss:
        total += head_parameters(shape)
        if shape.tie_word_embeddings and not (chunk.embedding or chunk.mtp):
            total += embedding_parameters(shape)  # tied weights on two stages are two copies
    return total


def state_bytes(plan: Plan) -> StateBytes:
    """Weights, gradients and optimizer state of the fullest rank.

    Gradients are accumulated in float32; Adam keeps two float32 moments, and a float32 copy of
    weights that are not float32 themselves. `optimizer.distributed` spreads the optimizer's part
    over the ranks that hold the same weights.
    """
    return max((_stage_bytes(plan, stage) for stage in stage_parameters(plan)), key=_total)


def logits_bytes(plan: Plan) -> int:
    """Most bytes that logits and their gradients take on a rank of the last stage, in an update."""
    how, depths = plan.logprob, 1 + plan.num_mtp_layers
    weight = DTYPE_BYTES[plan.model.dtype]
    columns = -(-plan.shape.vocab_size // plan.parallel.tp)
    logits = plan.batching.tokens_per_microbatch * columns
    if how.head == "logits":
        return depths * logits * weight  # the gradient is written over them
    each = 8 if weight == 4 else 8 + weight  # float32 both, and the gradient as products take it
    gradient = 4 * columns * plan.shape.hidden_size if how.loss_in_chunk else 0
    chunk, cache = min(how.chunk_bytes, logits * each), min(how.cache_bytes, depths * logits * 2)
    return chunk + cache + gradient


def _total(state: StateBytes) -> int:
    return state.total


def _stage_bytes(plan: Plan, stage: Parameters) -> StateBytes:
    parallel = plan.parallel
    dense = stage.replicated + -(-stage.tensor // parallel.tp)
    expert = -(-stage.expert // (parallel.ep * parallel.etp_size))
    dense_copies = expert_copies = 1
    if plan.optimizer.distributed:
        dense_copies = parallel.dp * parallel.cp
        expert_copies = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    weight = DTYPE_BYTES[plan.model.dtype]
    state = 8 if weight == 4 else 12
    weights = weight * (dense + expert)
    return StateBytes(
        weights=weights,
        gradients=4 * (dense + expert),
        optimizer=state * (-(-dense // dense_copies) + -(-expert // expert_copies)),
        reference=weights if plan.objective.kl_coef > 0 else 0,
    )
