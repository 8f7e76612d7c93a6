"""Bytes that the weights and the optimizer take on a rank."""

from __future__ import annotations

from dataclasses import dataclass

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.shape import (
    Parameters,
    embedding_parameters,
    head_parameters,
    layer_parameters,
)

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
    shape, pp, chunks = plan.shape, plan.parallel.pp, plan.parallel.vpp or 1
    stages = [Parameters() for _ in range(pp)]
    layers_per_chunk = shape.num_hidden_layers // (pp * chunks)
    for layer in range(shape.num_hidden_layers):
        stages[layer // layers_per_chunk % pp] += layer_parameters(shape, layer)
    stages[0] += embedding_parameters(shape)
    stages[-1] += head_parameters(shape)
    return stages


def state_bytes(plan: Plan) -> StateBytes:
    """Weights, gradients and optimizer state of the fullest rank.

    Gradients are accumulated in float32; Adam keeps two float32 moments, and a float32 copy of
    weights that are not float32 themselves. `optimizer.distributed` spreads the optimizer's part
    over the ranks that hold the same weights.
    """
    return max((_stage_bytes(plan, stage) for stage in stage_parameters(plan)), key=_total)


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
