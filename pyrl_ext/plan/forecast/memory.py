"""Bytes that every pipeline stage's fullest rank holds, item by item, in each phase of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyrl_ext.plan.forecast.activations import (
    DTYPE_BYTES,
    attention_scratch,
    dispatch_scratch,
    heads_of,
    is_latent,
    layer,
    stage_activations,
)
from pyrl_ext.plan.forecast.hardware import memory_limit
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.sizes import (
    Parameters,
    embedding_parameters,
    head_parameters,
    layer_parameters,
    mtp_parameters,
    parameters,
)
from pyrl_ext.plan.plan import Plan

# The phases of a step, in the order they come.
PHASES = ("publish", "rollout", "logprobs", "update")
PASSES = ("logprobs", "update")

GIB = 2**30
# What a process takes on a GPU before it computes: CUDA's context, libraries and their workspaces,
# and the buffers of one NCCL communicator. Assumed, not measured.
CONTEXT_BYTES, COMMUNICATOR_BYTES = GIB, GIB // 4


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

    def held(self, phase: str, host: bool = False, exact: bool = False) -> int:
        """Bytes that are held at once in `phase`; with `exact`, those that are counted only."""
        return sum(
            i.bytes for i in self.items if phase in i.phases and i.host == host and i.exact >= exact
        )

    @property
    def peak(self) -> int:
        """Most device bytes in any phase."""
        return max(self.held(phase) for phase in PHASES)

    def bytes_of(self, name: str) -> int:
        """Bytes of the items called `name`."""
        return sum(item.bytes for item in self.items if item.name == name)


@dataclass(frozen=True)
class Load:
    """How much a rank computes at a time."""

    rows: int
    """Of the largest microbatch on a rank, padded."""
    tokens: int
    """Rows of the whole rollout batch."""
    longest: int
    """Tokens of the longest sample."""

    @classmethod
    def most(cls, plan: Plan) -> Load:
        """Full microbatches, and samples of the greatest length."""
        longest = plan.data.max_prompt_tokens + plan.rollout.max_new_tokens
        rows = plan.samples * (longest - 1)  # the last token of a sample is never an input
        return cls(plan.batching.tokens_per_microbatch, rows, longest)


def stage_memory(plan: Plan, load: Load | None = None) -> tuple[StageMemory, ...]:
    """One entry a pipeline stage, for `load`; None: for the most that the plan allows."""
    return tuple(memory_of(plan, stage, load) for stage in range(plan.parallel.pp))


def memory_of(plan: Plan, stage: int, load: Load | None = None) -> StageMemory:
    """That of one pipeline stage."""
    return StageMemory(stage, tuple(_items(plan, stage, load or Load.most(plan))))


def _items(plan: Plan, stage: int, load: Load) -> Iterator[Item]:
    yield from _state(plan, stage)
    passes = [*_activations(plan, stage, load.rows), *_logits(plan, stage, load.rows)]
    yield from passes
    yield from _optimizer_scratch(plan, stage, passes)
    yield from _routes(plan, stage, load)
    yield _publish(plan)
    yield from _engine(plan, load)
    yield from _context(plan)


# Parameters -------------------------------------------------------------------------------------


def stage_parameters(plan: Plan) -> list[Parameters]:
    """Parameters of each pipeline stage, with interleaved chunks put together."""
    return [
        sum((chunk_parameters(plan, chunk) for chunk in stage), Parameters())
        for stage in plan.stages
    ]


def chunk_parameters(plan: Plan, chunk: ModelChunk) -> Parameters:
    """Parameters of one model chunk, with its copies of what other stages hold as well."""
    sizes, total = plan.sizes, Parameters()
    for index in chunk.layers:
        total += layer_parameters(sizes, index)
    for _ in range(chunk.mtp):
        total += mtp_parameters(sizes)
    if chunk.embedding or chunk.mtp:
        total += embedding_parameters(sizes)
    if chunk.loss:
        total += head_parameters(sizes)
        if sizes.tie_word_embeddings and not (chunk.embedding or chunk.mtp):
            total += embedding_parameters(sizes)  # tied weights on two stages are two copies
    return total


def rank_parameters(plan: Plan, stage: int) -> tuple[int, int]:
    """(parameters outside of routed experts, in routed experts) that a rank of `stage` holds, with
    the vocabulary's padding."""
    sizes, parallel = plan.sizes, plan.parallel
    chunks = plan.stages[stage]
    total = sum((chunk_parameters(plan, chunk) for chunk in chunks), Parameters())
    tables = sum(_vocabulary_tables(plan, chunk) for chunk in chunks)
    split = total.tensor - tables * sizes.vocab_size * sizes.hidden_size
    padded = -(-sizes.vocab_size // parallel.tp) * sizes.hidden_size
    dense = total.replicated + split // parallel.tp + tables * padded
    return dense, -(-total.expert // (parallel.ep * parallel.etp_size))


def _vocabulary_tables(plan: Plan, chunk: ModelChunk) -> int:
    reads = bool(chunk.embedding or chunk.mtp)
    return reads + (chunk.loss and not (plan.sizes.tie_word_embeddings and reads))


def _spread(plan: Plan, stage: int) -> int:
    """Parameters whose optimizer state a rank holds."""
    parallel, (dense, expert) = plan.parallel, rank_parameters(plan, stage)
    if not plan.optimizer.distributed:
        return dense + expert
    copies = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    return -(-dense // (parallel.dp * parallel.cp)) + -(-expert // max(1, copies))


def _state(plan: Plan, stage: int) -> Iterator[Item]:
    """Weights, gradients and optimizer state. Gradients are accumulated in float32; Adam keeps two
    float32 moments, and a float32 copy of weights that are not float32 themselves."""
    count, spread = sum(rank_parameters(plan, stage)), _spread(plan, stage)
    weight = DTYPE_BYTES[plan.model.dtype]
    adam = 8 if weight == 4 else 12
    part = " of the rank's part" if plan.optimizer.distributed else ""
    on_host = math.ceil(plan.optimizer.offload * spread)
    away = {"none": (), "optimizer": ("optimizer",), "all": ("weights", "gradients", "optimizer")}
    for name, held, why in (
        ("weights", weight * count, f"{weight} bytes a parameter ({count:,})"),
        ("gradients", 4 * count, "4 bytes a parameter, reduced in place"),
        ("optimizer", adam * (spread - on_host), f"{adam} bytes a parameter{part} ({spread:,})"),
    ):
        if name in away[plan.rollout.offload_trainer]:
            gone = PHASES[1:2] if name == "weights" else PHASES[:2]  # the engine reads the weights
            there = tuple(phase for phase in PHASES if phase not in gone)
            yield Item(name, held, there, f"{why}; else in host memory")
            yield Item(f"{name} on the host", held, gone, why, host=True)
        else:
            yield Item(name, held, PHASES, why)
    if on_host:
        why = "16 bytes a parameter: weight, gradient and two moments in float32"
        yield Item("offloaded optimizer", 16 * on_host, PHASES, why, exact=False, host=True)
    if plan.model.fp8:
        why = "2 bytes a parameter: 8-bit copies for products and, transposed, for their gradients"
        yield Item("8-bit weights", 2 * count, PASSES, why, exact=False)
    if plan.objective.kl_coef > 0:
        why = "the initial weights, kept since objective.kl_coef is above 0"
        yield Item("reference", weight * count, PHASES, why)


def _optimizer_scratch(plan: Plan, stage: int, passes: list[Item]) -> Iterator[Item]:
    """torch's AdamW takes the roots of all second moments at once on a GPU, when the activations
    are gone."""
    free = sum(item.bytes for item in passes if "update" in item.phases and not item.host)
    more = 4 * _spread(plan, stage) - free
    if plan.device == "cuda" and plan.model.backend == "local" and more > 0:
        why = "4 bytes a parameter of the optimizer's part, less what activations leave free"
        yield Item("optimizer scratch", more, ("update",), why, exact=False)


# Passes -----------------------------------------------------------------------------------------


def _activations(plan: Plan, stage: int, rows: int) -> Iterator[Item]:
    found = stage_activations(plan, stage)
    kept = math.ceil(rows * (found.kept + found.again - found.offloaded))
    again = f" + {found.again:,.0f} of one layer at a time" if found.again else ""
    why = f"{rows:,} rows x {found.kept - found.offloaded:,.0f} bytes{again}; recompute: "
    yield Item("activations", kept, ("update",), why + plan.model.recompute, exact=False)
    if found.offloaded:
        why = f"of {plan.model.offload_layers} layers of every chunk and microbatch"
        held = math.ceil(rows * found.offloaded)
        yield Item("offloaded activations", held, ("update",), why, exact=False, host=True)
    sparse = {i in plan.router_layers for chunk in plan.stages[stage] for i in chunk.layers}
    sparse |= {bool(plan.router_layers) for chunk in plan.stages[stage] if chunk.mtp}
    if not sparse:  # an embedding or a loss alone
        return
    widest = max(layer(plan, kind).whole for kind in sparse)
    why = "as much as one layer would keep for a backward pass"
    yield Item("forward pass", math.ceil(rows * widest), ("logprobs",), why, exact=False)
    yield _scratch(plan, rows, experts=True in sparse)


def _scratch(plan: Plan, rows: int, experts: bool) -> Item:
    """What the backward pass of one layer holds beside what was saved: its attention's, then its
    experts'."""
    attention = math.ceil(rows * attention_scratch(plan))
    dispatch = math.ceil(rows * dispatch_scratch(plan)) if experts else 0
    why = "gradients of core attention"
    if experts:
        copies = f"copies of {plan.sizes.topk} rows a token for experts that are used evenly"
        why = f"the larger of {attention:,} for {why} and {dispatch:,} for {copies}; these are "
        why += f"{_worst_imbalance(plan):g} times as much if every token chose experts of one rank"
    return Item("scratch", max(attention, dispatch), ("update",), why, exact=False)


def _worst_imbalance(plan: Plan) -> float:
    """Most rows that the experts of one rank can get, over an equal share."""
    local = plan.sizes.num_experts // plan.parallel.ep
    return plan.parallel.ep * min(local, plan.sizes.topk) / plan.sizes.topk


def _logits(plan: Plan, stage: int, rows: int) -> list[Item]:
    if not any(chunk.loss for chunk in plan.stages[stage]):
        return []
    how = "a chunk at a time" if plan.logprob.head == "fused" else "of a full microbatch"
    return [Item("logits", logits_bytes(plan, rows), PASSES, how, exact=False)]


def logits_bytes(plan: Plan, rows: int | None = None) -> int:
    """Most bytes that logits and their gradients take on a rank of the last stage, in an update.

    `rows`: of the microbatch; None: as many as the plan allows.
    """
    how, depths = plan.logprob, 1 + plan.num_mtp_layers
    weight = DTYPE_BYTES[plan.model.dtype]
    columns = -(-plan.sizes.vocab_size // plan.parallel.tp)
    logits = (rows or plan.batching.tokens_per_microbatch) * columns
    if how.head == "logits":
        return depths * logits * weight  # the gradient is written over them
    each = 4 if weight == 4 else 4 + weight  # the gradient over them, and as products take it
    gradient = 4 * columns * plan.sizes.hidden_size if how.loss_in_chunk else 0
    chunk, cache = min(how.chunk_bytes, logits * each), min(how.cache_bytes, depths * logits * 2)
    return chunk + cache + gradient


def _routes(plan: Plan, stage: int, load: Load) -> Iterator[Item]:
    """The rollout batch's on the host; on the device those of the microbatch that computes, once
    as they came and once a layer, and of the one ahead."""
    sizes, routers = plan.sizes, plan.router_layers
    if not (plan.replay.enabled and routers):
        return
    each = sizes.route_bytes_per_token
    why = f"{each} bytes a token x {load.tokens:,} tokens, the whole rollout batch on every rank"
    yield Item("routes of the batch", each * load.tokens, PHASES[1:], why, host=True)
    mine = [routers.index(i) for chunk in plan.stages[stage] for i in chunk.layers if i in routers]
    if not mine:
        return
    a_layer, rows = each // len(routers), -(-load.rows // plan.parallel.tp)
    sent = a_layer * (max(mine) + 1 - min(mine)) + 9
    replay = plan.replay
    passes = [p for p, on in zip(PASSES, (replay.old or replay.reference, replay.train)) if on]
    why = f"{rows:,} rows x ({sent} as sent, a row number and a flag among them, + "
    why += f"{a_layer * len(mine)} as {len(mine)} routers take them)"
    held = rows * (sent + a_layer * len(mine))
    yield Item("routes", held, tuple(passes), why)
    why = f"{rows:,} rows x {sent} bytes of the next microbatch"
    yield Item("routes ahead", rows * sent, tuple(passes), why)


# Engine and machine -----------------------------------------------------------------------------


def _publish(plan: Plan) -> Item:
    """Weights go to the engine a bucket at a time, taken out of it one by one."""
    sizes, parallel, each = plan.sizes, plan.parallel, DTYPE_BYTES[plan.model.dtype]
    widest = max(sizes.vocab_size, sizes.intermediate_size) * sizes.hidden_size
    held, why = widest * (each + 1), "the largest tensor and its check for nan"
    if max(parallel.tp, parallel.pp, parallel.ep, parallel.etp_size) > 1:
        experts = max(layer.expert for layer in sizes.layers)
        bucket = max(plan.rollout.bucket_bytes, each * max(widest, experts))
        held += min(bucket, each * parameters(sizes).total)
        why = f"a bucket, {why}"
        if plan.rollout.engine == "vllm" and plan.rollout.gpus is None:
            held += each * experts
            why += ", a layer's experts, which vLLM keeps until it has all"
    if plan.transport in ("ipc", "broadcast"):
        held += 2 * plan.rollout.bucket_bytes
        why = f"{why}, and two buckets on their way"
    return Item("publish", held, ("publish",), why, exact=False)


def _engine(plan: Plan, load: Load) -> Iterator[Item]:
    """The rollout engine, where it shares the trainer's devices."""
    rollout, each = plan.rollout, DTYPE_BYTES[plan.rollout_dtype]
    weights = each * parameters(plan.sizes).total
    if rollout.engine == "hf":
        why = f"{each} bytes a parameter, the whole model on every rank"
        held_in = PHASES[:2] if plan.engine_sleeps else PHASES
        yield Item("engine weights", weights, held_in, why)
        yield _embedded_cache(plan, load)
    elif rollout.engine == "vllm" and rollout.gpus is None:
        limit, share = memory_limit(plan), rollout.gpu_memory_utilization
        held = weights // rollout.tp
        why = f"{each} bytes a parameter / rollout.tp {rollout.tp}"
        if limit is None:
            yield Item("engine weights", held, PHASES[:2] if rollout.sleep else PHASES, why)
            return
        whole = int(share * limit)
        left = max(0, whole - held) // _cache_bytes_per_token(plan, rollout.tp)
        yield Item(
            "engine",
            whole,
            ("rollout",) if rollout.sleep else PHASES,
            f"rollout.gpu_memory_utilization {share:g}: weights ({why}), and a cache of about "
            f"{left:,} tokens",
        )
        if rollout.sleep:
            yield Item("engine weights", held, ("publish",), f"{why}; the cache still sleeps")


def _embedded_cache(plan: Plan, load: Load) -> Item:
    prompts = -(-plan.prompts_asked // plan.parallel.world_size)
    slots = min(plan.rollout.max_num_seqs, prompts * plan.batching.samples_per_prompt)
    tokens = slots * load.longest
    each = _cache_bytes_per_token(plan, 1)
    # a slot's token, log-prob and routes, and three float32 copies of its logits
    state = tokens * (12 + plan.sizes.route_bytes_per_token) + 12 * slots * plan.sizes.vocab_size
    why = f"{slots} sequences, {tokens:,} tokens x {each:,} bytes, and their logits"
    return Item("engine cache", tokens * each + state, ("rollout",), why, exact=False)


def _cache_bytes_per_token(plan: Plan, tp: int) -> int:
    sizes: Any = plan.sizes
    if is_latent(sizes):  # one latent for all heads: a copy on every rank
        width = sizes.kv_lora_rank + sizes.qk_rope_head_dim
    else:
        heads = heads_of(plan)
        groups = sizes.query_groups or sizes.num_attention_heads
        width = 2 * heads.query // heads.number * max(1, groups // tp)
    return DTYPE_BYTES[plan.rollout_dtype] * sizes.num_hidden_layers * width


def _context(plan: Plan) -> Iterator[Item]:
    if plan.device != "cuda":
        return
    parallel = plan.parallel
    expert_copies = parallel.world_size // (parallel.pp * parallel.ep * parallel.etp_size)
    sizes = (parallel.tp, parallel.cp, parallel.dp, parallel.dp * parallel.cp, parallel.pp)
    groups = sum(n > 1 for n in (*sizes, parallel.ep, parallel.etp_size, expert_copies))
    held = CONTEXT_BYTES + groups * COMMUNICATOR_BYTES
    why = f"assumed: 1 GiB, and 0.25 GiB for each of {groups} NCCL communicators"
    yield Item("CUDA and NCCL", held, PHASES, why, exact=False)
