"""Bytes that every pipeline stage's fullest rank holds, item by item, in each phase of a step."""

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

# The phases of a step, in the order they come.
PHASES = ("publish", "rollout", "logprobs", "update")


@dataclass(frozen=True)
class Item:
    """Bytes with one purpose on a rank."""

    name: str
    bytes: int
    phases: tuple[str, ...]
    """When it is held, of `PHASES`."""
    why: str
    """How it is counted, or what the estimate assumes."""
    exact: bool = True
    """Counted from shapes; False: estimated."""
    host: bool = False
    """In the host's memory, not the device's."""


@dataclass(frozen=True)
class StageMemory:
    """What the fullest rank of one pipeline stage holds."""

    stage: int
    items: tuple[Item, ...]

    def held(self, phase: str, host: bool = False) -> int:
        """Bytes that are held at once in `phase`."""
        return sum(i.bytes for i in self.items if phase in i.phases and i.host == host)

    @property
    def peak(self) -> int:
        """Most device bytes in any phase."""
        return max(self.held(phase) for phase in PHASES)

    def bytes_of(self, name: str) -> int:
        """Bytes of the items called `name`."""
        return sum(item.bytes for item in self.items if item.name == name)


def stage_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """One entry a pipeline stage."""
    stages = zip(stage_parameters(plan), plan.stages, strict=True)
    return tuple(
        StageMemory(i, (*_state(plan, held), *_logits(plan, chunks)))
        for i, (held, chunks) in enumerate(stages)
    )


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


def _state(plan: Plan, stage: Parameters) -> list[Item]:
    """Weights, gradients and optimizer state. Gradients are accumulated in float32; Adam keeps two
    float32 moments, and a float32 copy of weights that are not float32 themselves."""
    parallel = plan.parallel
    dense = stage.replicated + -(-stage.tensor // parallel.tp)
    expert = -(-stage.expert // (parallel.ep * parallel.etp_size))
    dense_copies = expert_copies = 1
    if plan.optimizer.distributed:
        dense_copies = parallel.dp * parallel.cp
        expert_copies = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    weight = DTYPE_BYTES[plan.model.dtype]
    state = 8 if weight == 4 else 12
    spread = -(-dense // dense_copies) + -(-expert // expert_copies)
    items = [
        Item("weights", weight * (dense + expert), PHASES, f"{weight} bytes a parameter"),
        Item("gradients", 4 * (dense + expert), PHASES, "4 bytes a parameter"),
        Item("optimizer", state * spread, PHASES, f"{state} bytes a parameter"),
    ]
    if plan.objective.kl_coef > 0:
        why = "the initial weights, kept since objective.kl_coef is above 0"
        items.append(Item("reference", weight * (dense + expert), PHASES, why))
    return items


def _logits(plan: Plan, chunks: tuple[Stage, ...]) -> list[Item]:
    if not any(chunk.loss for chunk in chunks):
        return []
    how = "a chunk at a time" if plan.logprob.head == "fused" else "of a microbatch"
    return [Item("logits", logits_bytes(plan), ("update",), how)]


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
