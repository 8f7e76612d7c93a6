"""Memory of the fullest rank of every pipeline stage, item by item, in each phase of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from pyrl_ext.plan.forecast.activations import (
    attention_scratch,
    dispatch_scratch,
    layer,
    stage_activations,
)
from pyrl_ext.plan.forecast.attention import kv_bytes_per_token
from pyrl_ext.plan.forecast.encoder import encoder_parameters, encoder_stages, encoders
from pyrl_ext.plan.forecast.encoder_memory import encoder_items
from pyrl_ext.plan.forecast.hardware import memory_limit
from pyrl_ext.plan.forecast.items import PASSES, Item, context, state_items
from pyrl_ext.plan.forecast.lora import factor_numbers, published_numbers
from pyrl_ext.plan.forecast.parameters import (
    held_on_rank,
    optimizer_parameters,
    rank_parameters,
    trained_of_stage,
)
from pyrl_ext.plan.forecast.publishing import gathered, uses_buckets
from pyrl_ext.plan.forecast.state_layers import state_bytes, state_scratch
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.layer_kinds import LayerKind
from pyrl_ext.plan.phases import MEMORY_PHASES, START, WITHOUT_ROLLOUTS
from pyrl_ext.plan.plan import Plan


@dataclass(frozen=True)
class StageMemory:
    """Memory of the fullest rank of one pipeline stage."""

    stage: int
    items: tuple[Item, ...]
    phases: tuple[str, ...] = MEMORY_PHASES
    """Phases of `START` and `MEMORY_PHASES`."""
    module: str = "llm"
    """The module whose stage it is; stages of encoders follow those of the language model."""

    def held(self, phase: str, host: bool = False, exact: bool = False) -> int:
        """Bytes held at the same time in `phase`; with `exact`, without estimated items."""
        return sum(
            i.bytes for i in self.items if phase in i.phases and i.host == host and i.exact >= exact
        )

    @property
    def name(self) -> str:
        """The stage in words."""
        return (
            f"stage {self.stage}" if self.module == "llm" else f"stage {self.stage} ({self.module})"
        )

    @property
    def peak(self) -> int:
        """Most device bytes in any phase."""
        return max(self.held(phase) for phase in self.phases)

    def bytes_of(self, name: str) -> int:
        """Bytes of the items called `name`."""
        return sum(item.bytes for item in self.items if item.name == name)


@dataclass(frozen=True)
class Load:
    """Number of tokens a rank computes."""

    rows: int
    """Padded rows of the largest microbatch on a rank."""
    tokens: int
    """Rows of the whole rollout batch."""
    longest: int
    """Tokens of the longest sample."""

    @classmethod
    def most(cls, plan: Plan) -> Load:
        """The most that the plan allows: full microbatches, samples of the greatest length."""
        rows = plan.samples * plan.longest  # the last token of a sample is never an input
        return cls(plan.batching.tokens_per_microbatch, rows, plan.longest + 1)


def stage_memory(plan: Plan, load: Load | None = None) -> tuple[StageMemory, ...]:
    """Memory of every pipeline stage for `load`; None: for the most that the plan allows."""
    return tuple(memory_of(plan, stage, load) for stage in range(num_stages(plan)))


def num_stages(plan: Plan) -> int:
    """Pipeline stages of the language model, and of encoders with ranks for themselves."""
    return plan.parallel.pp + len([*encoder_stages(plan)])


def memory_of(plan: Plan, stage: int, load: Load | None = None) -> StageMemory:
    """Memory of one pipeline stage."""
    phases = MEMORY_PHASES if plan.has_rollouts else WITHOUT_ROLLOUTS
    if plan.shares_gpus:
        phases = START, *phases
    module = "llm"
    load = load or Load.most(plan)
    if stage < plan.parallel.pp:
        found = _items(plan, stage, load)
    else:
        encoder, part = [*encoder_stages(plan)][stage - plan.parallel.pp]
        module = encoder.name
        found = encoder_items(encoder, part)
    items = (replace(i, phases=tuple(p for p in i.phases if p in phases)) for i in found)
    return StageMemory(stage, tuple(item for item in items if item.phases), phases, module)


def _items(plan: Plan, stage: int, load: Load) -> Iterator[Item]:
    held = held_on_rank(plan, stage)
    trained = trained_of_stage(plan, stage)
    with_gradients = rank_parameters(plan, trained).total
    yield from state_items(plan, held, with_gradients, optimizer_parameters(plan, trained))
    if plan.model.fp8:
        why = "2 bytes a parameter: 8-bit copies for products and, transposed, for their gradients"
        yield Item("8-bit weights", 2 * held, PASSES, why, exact=False)
    for encoder in encoders(plan):
        if encoder.shared and stage == 0:
            yield from encoder_items(encoder, 0)
    yield from _activations(plan, stage, load.rows)
    yield from _logits(plan, stage, load.rows)
    yield from _routes(plan, stage, load)
    if plan.has_rollouts:
        yield _publish(plan)
        yield from _send_buffers(plan)
        if plan.rollout.publishes_beside:
            yield _copy_of_weights(plan)
        yield from _engine(plan, load)
    yield from context(plan, plan.grids["llm"].rank_of(pp=stage))


# Passes -----------------------------------------------------------------------------------------


def _activations(plan: Plan, stage: int, rows: int) -> Iterator[Item]:
    saved = stage_activations(plan, stage)
    kept = math.ceil(rows * (saved.kept + saved.again - saved.offloaded))
    again = f" + {saved.again:,.0f} of one layer at a time" if saved.again else ""
    why = f"{rows:,} rows x {saved.kept - saved.offloaded:,.0f} bytes{again}; recompute: "
    yield Item("activations", kept, ("update",), why + plan.model.recompute, exact=False)
    if saved.offloaded:
        why = f"{plan.model.offload_layers} layers of every chunk and microbatch"
        held = math.ceil(rows * saved.offloaded)
        yield Item("offloaded activations", held, ("update",), why, exact=False, host=True)
    kinds = {kind for chunk in plan.stages[stage] for kind in plan.sizes.kinds_in(chunk)}
    if not kinds:  # the stage holds only the embedding or the loss
        return
    widest = max(layer(plan, kind).whole for kind in kinds)
    why = "as much as one layer saves for its backward pass"
    yield Item("forward pass", math.ceil(rows * widest), ("logprobs",), why, exact=False)
    yield _scratch(plan, rows, kinds)


def _scratch(plan: Plan, rows: int, kinds: Set[LayerKind]) -> Item:
    """Temporary memory of one layer's backward pass: of its mixer, then of its experts."""
    experts = any(kind.feed_forward == "moe" for kind in kinds)
    states = state_scratch(plan) if any(kind.has_state for kind in kinds) else 0
    attends = any(kind.mixer == "attention" for kind in kinds)
    attention = math.ceil(rows * max(states, attention_scratch(plan) if attends else 0))
    dispatch = math.ceil(rows * dispatch_scratch(plan)) if experts else 0
    why = "gradients of core attention" if not states else "gradients of mixers"
    if experts:
        rows_copied = f"{plan.sizes.topk} copies of each token's row, with experts evenly used"
        why = f"the larger of {attention:,} for {why} and {dispatch:,} for {rows_copied} "
        why += f"(x {_worst_imbalance(plan):g} if every token chose experts of one rank)"
    return Item("scratch", max(attention, dispatch), ("update",), why, exact=False)


def _worst_imbalance(plan: Plan) -> float:
    """Most rows that the experts of one rank can get, over an equal share."""
    local = plan.sizes.num_experts // plan.parallel.ep
    return plan.parallel.ep * min(local, plan.sizes.topk) / plan.sizes.topk


def _logits(plan: Plan, stage: int, rows: int) -> list[Item]:
    if not any(chunk.loss for chunk in plan.stages[stage]):
        return []
    how = "one chunk at a time" if plan.logprob.head == "fused" else "of a full microbatch"
    return [Item("logits", logits_bytes(plan, rows), PASSES, how, exact=False)]


def logits_bytes(plan: Plan, rows: int | None = None) -> int:
    """Most bytes of logits and their gradients on a rank of the last stage, in an update.

    `rows`: of the microbatch; None: as many as the plan allows.
    """
    how = plan.logprob
    depths = 1 + plan.num_mtp_layers
    weight = DTYPE_BYTES[plan.model.dtype]
    columns = -(-plan.sizes.vocab_size // plan.parallel.tp)
    logits = (rows or plan.batching.tokens_per_microbatch) * columns
    if how.head == "logits":
        return depths * logits * weight  # the gradient overwrites them
    # the float32 gradient overwrites the logits; products read a copy in the weights' dtype
    each = 4 if weight == 4 else 4 + weight
    gradient = 4 * columns * plan.sizes.hidden_size if how.loss_in_chunk else 0
    chunk = min(how.chunk_bytes, logits * each)
    cache = min(how.cache_bytes, depths * logits * 2)
    return chunk + cache + gradient


def _routes(plan: Plan, stage: int, load: Load) -> Iterator[Item]:
    """Routed experts of this rank's layers: on the host those of its rows of the whole step; on the
    device those of the microbatch that computes (as sent, and gathered layer by layer) and those of
    the next one (as sent)."""
    sizes = plan.sizes
    routers = plan.router_layers
    if not (plan.replay.enabled and routers):
        return
    here = [routers.index(i) for chunk in plan.stages[stage] for i in chunk.layers if i in routers]
    if not here:
        return
    each = sizes.route_bytes_per_token
    parallel = plan.parallel
    shared = parallel.world_size // parallel.pp
    share = -(-load.tokens // shared)
    mine = each // len(routers) * len(here)
    why = f"{mine} bytes of {len(here)} layers x {share:,} of {load.tokens:,} tokens"
    name = "routes of the batch"
    yield Item(name, mine * share, MEMORY_PHASES[1:], why, host=True, exact=shared == 1)
    a_layer = each // len(routers)
    rows = -(-load.rows // plan.parallel.tp)
    sent = a_layer * (max(here) + 1 - min(here)) + 9
    replay = plan.replay
    passes = [p for p, on in zip(PASSES, (replay.old or replay.reference, replay.train)) if on]
    why = f"{rows:,} rows x ({sent} bytes as sent, with a row number and a flag, + "
    why += f"{a_layer * len(here)} as {len(here)} routers read them)"
    held = rows * (sent + a_layer * len(here))
    yield Item("routes", held, tuple(passes), why)
    why = f"{rows:,} rows x {sent} bytes of the next microbatch"
    yield Item("routes ahead", rows * sent, tuple(passes), why)


# Engine and machine -----------------------------------------------------------------------------


def _publish(plan: Plan) -> Item:
    """Weights are gathered a bucket at a time. An engine in this process copies its tensors from
    the bucket; for another one it is copied into a buffer that is sent (`_send_buffers`)."""
    largest, experts, bucket = gathered(plan)
    held = largest + largest // DTYPE_BYTES[plan.model.dtype]
    why = "the largest tensor and its check for nan"
    if uses_buckets(plan):
        held += bucket
        why = f"a bucket, {why}"
        if plan.rollout.engine == "vllm" and not (plan.rollout.gpus or plan.remote_engines):
            held += experts
            why += ", one layer's experts (vLLM keeps them until it has all)"
    if plan.transport == "servers":
        held += max(bucket, plan.rollout.bucket_bytes)
        why = f"{why}, and a bucket on its way to the host"
    return Item("publish", held, ("publish",), why, exact=False)


def _send_buffers(plan: Plan) -> Iterator[Item]:
    """The two buffers, filled in turn, that an engine in another process reads. They are kept from
    one publish to the next: the engine has opened them (`rollout/process/sender.py`), and torch
    keeps pinned memory. What `_copy_of_weights` counts is sent without them."""
    if plan.transport == "inprocess" or plan.rollout.publishes_beside:
        return
    _, _, bucket = gathered(plan)
    held = 2 * max(bucket, plan.rollout.bucket_bytes)
    why = "two buckets on their way to the engine, kept from the first publish on"
    host = plan.transport in ("shm", "servers")
    yield Item("send buffers", held, MEMORY_PHASES, why, exact=False, host=host)


def _copy_of_weights(plan: Plan) -> Item:
    """A sender keeps a copy of its part while engines get it and the trainer goes on."""
    whole = (published_numbers(plan) + encoder_parameters(plan)) * DTYPE_BYTES[plan.model.dtype]
    senders = plan.rollout.senders
    why = f"what each of {senders} senders sends, copied: rollout.overlap_publish"
    phases = ("publish", *MEMORY_PHASES[1:3])
    return Item("published weights", whole // senders, phases, why, exact=False, host=True)


def _engine(plan: Plan, load: Load) -> Iterator[Item]:
    """The rollout engine, if it shares the trainer's devices."""
    rollout = plan.rollout
    each = DTYPE_BYTES[plan.rollout_dtype]
    if plan.remote_engines:
        return
    always = (START, *MEMORY_PHASES)
    loaded = (START, *MEMORY_PHASES[:2])
    weights = each * (parameters(plan.sizes).total + encoder_parameters(plan))
    factors = each * factor_numbers(plan) * (plan.lora_publish == "adapter")
    if rollout.engine == "hf":
        why = f"{each} bytes a parameter, the whole model on every rank"
        while_awake = loaded if plan.engine_sleeps else always
        yield Item("engine weights", weights, while_awake, why)
        if factors:
            why = f"{each} bytes a number of all factors"
            yield Item("engine adapters", factors, while_awake, why)
        yield _embedded_cache(plan, load)
    elif rollout.engine == "vllm" and rollout.gpus is None:
        limit = memory_limit(plan)
        share = rollout.gpu_memory_utilization
        held = (weights + factors) // rollout.tp
        why = f"{each} bytes a parameter / rollout.tp {rollout.tp}"
        if limit is None:
            yield Item("engine weights", held, loaded if rollout.sleep else always, why)
            return
        whole = int(share * limit)
        left = max(0, whole - held) // max(1, kv_bytes_per_token(plan, rollout.tp))
        yield Item(
            "engine",
            whole,
            (START, "rollout") if rollout.sleep else always,
            f"rollout.gpu_memory_utilization {share:g}: weights ({why}), and a KV cache of about "
            f"{left:,} tokens",
        )
        if rollout.sleep:
            yield Item("engine weights", held, ("publish",), f"{why}; the KV cache still sleeps")


def _embedded_cache(plan: Plan, load: Load) -> Item:
    prompts = -(-plan.prompts_asked // plan.parallel.world_size)
    slots = min(plan.max_num_seqs, prompts * plan.batching.samples_per_prompt)
    tokens = slots * load.longest
    each = kv_bytes_per_token(plan, 1)
    # a slot's token, log-prob and routes, and three float32 copies of its logits
    state = slots * state_bytes(plan, 1)
    state += tokens * (12 + plan.sizes.route_bytes_per_token) + 12 * slots * plan.sizes.vocab_size
    why = f"{slots} sequences, {tokens:,} tokens x {each:,} bytes, and their logits"
    return Item("engine cache", tokens * each + state, ("rollout",), why, exact=False)
