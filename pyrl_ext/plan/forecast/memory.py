"""Memory of the fullest rank of every pipeline stage, item by item, in each phase of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyrl_ext.plan.forecast.activations import (
    dispatch_scratch,
    layer,
    mixer_scratch,
    stage_activations,
)
from pyrl_ext.plan.forecast.encoder import (
    EncoderForecast,
    encoder_parameters,
    encoder_stages,
    encoders,
)
from pyrl_ext.plan.forecast.engine_memory import engine_items
from pyrl_ext.plan.forecast.items import PASSES, Item, context, frozen_items, state_items
from pyrl_ext.plan.forecast.muon import muon_parameters
from pyrl_ext.plan.forecast.parameters import (
    held_on_rank,
    optimizer_parameters,
    published,
    rank_parameters,
    trained_of_stage,
)
from pyrl_ext.plan.model.counts import layers, parameters
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
        return f"stage {self.stage}" + (f" ({self.module})" if self.module != "llm" else "")

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
    """Memory of every pipeline stage, then of encoders' stages, for `load`; None: for the most that
    the plan allows."""
    load = load or Load.most(plan)
    found = [
        _stage(plan, stage, "llm", _items(plan, stage, load)) for stage in range(plan.parallel.pp)
    ]
    for encoder, stage in encoder_stages(plan):
        found.append(_stage(plan, len(found), encoder.name, _encoder_items(encoder, stage)))
    return tuple(found)


def _stage(plan: Plan, stage: int, module: str, items: Iterator[Item]) -> StageMemory:
    phases = MEMORY_PHASES if plan.has_rollouts else WITHOUT_ROLLOUTS
    if plan.shares_gpus:
        phases = (START, *phases)
    cut = (replace(i, phases=tuple(p for p in i.phases if p in phases)) for i in items)
    return StageMemory(stage, tuple(item for item in cut if item.phases), phases, module)


def _items(plan: Plan, stage: int, load: Load) -> Iterator[Item]:
    held = held_on_rank(plan, stage)
    trained = trained_of_stage(plan, stage)
    with_gradients = rank_parameters(plan, trained).total
    stepped = optimizer_parameters(plan, trained)
    by_muon = muon_parameters(plan, stage)
    yield from state_items(plan, held, with_gradients, stepped, by_muon=by_muon)
    if plan.model.fp8:
        why = "2 bytes a parameter: 8-bit copies for products and, transposed, for their gradients"
        yield Item("8-bit weights", 2 * held, PASSES, why, exact=False)
    for number, (name, teacher) in enumerate(plan.teacher_plans.items(), 1):
        count = held_on_rank(teacher, stage)
        why = f"{teacher.weight_bytes} bytes a parameter ({count:,}) of {name}"
        item = "teacher" if number == 1 else f"teacher {number}"
        yield from frozen_items(plan, item, teacher.weight_bytes * count, why)
        if plan.objective.compares_distributions and any(c.loss for c in plan.stages[stage]):
            yield _hidden_states(plan, teacher, load)
    for encoder in encoders(plan):
        if encoder.shared and stage == 0:
            yield from _encoder_items(encoder, 0)
    yield from _activations(plan, stage, load.rows)
    if any(chunk.loss for chunk in plan.stages[stage]):
        why = "one chunk at a time" if plan.logprob.head == "fused" else "of a full microbatch"
        yield Item("logits", logits_bytes(plan, load.rows), PASSES, why, exact=False)
    yield from _routes(plan, stage, load)
    if plan.has_rollouts:
        yield from _publish(plan)
        yield from engine_items(plan, load.longest)
    yield from context(plan, plan.grids["llm"].rank_of(pp=stage))


def _encoder_items(encoder: EncoderForecast, stage: int) -> Iterator[Item]:
    """A stage of an encoder: no optimizer state, gradients or saved activations where it is
    frozen. On ranks of the language model, names of the items tell whose they are."""
    plan = encoder.plan
    train = encoder.module.train
    of = f" of {encoder.name}" if encoder.shared else ""
    count = encoder.on_rank(stage)
    patches = encoder.module.patches_per_microbatch
    yield from state_items(plan, count, count * train, encoder.stepped(stage), of)
    if train:
        flying = encoder.in_flight(stage)
        held = math.ceil(patches * encoder.activations(stage) * flying)
        why = f"{patches:,} patches, {flying} microbatches in flight"
        yield Item(f"activations{of}", held, ("update",), why, exact=False)
    why = "as much as one layer saves for its backward pass"
    yield Item(f"forward pass{of}", math.ceil(patches * encoder.saved), PASSES, why, exact=False)
    if stage == 0:
        width = encoder.tower.patch_width
        held = patches * width * (1 + plan.weight_bytes)
        yield Item("patches", held, PASSES, "in 8 bits, and as they are read", exact=False)
        share = math.ceil(encoder.step_patches / encoder.parallel.dp)
        why = f"{share:,} patches x {width} bytes (estimate)"
        phases = MEMORY_PHASES[1:]  # images come with the samples
        yield Item("patches of the batch", share * width, phases, why, exact=False, host=True)
    if encoder.shared:  # the language model's rank counts the rest
        return
    if plan.has_rollouts:
        largest, _, bucket = _gathered(plan)
        why = "a bucket, as every rank receives all tensors, and the largest of them"
        yield Item("publish", bucket + largest, ("publish",), why, exact=False)
    yield from context(plan, plan.grids[encoder.name].rank_of(pp=stage))


# Passes -----------------------------------------------------------------------------------------


def _activations(plan: Plan, stage: int, rows: int) -> Iterator[Item]:
    saved = stage_activations(plan, stage)
    why = f"{rows:,} rows x {saved.kept:,.0f} + {saved.again:,.0f} bytes of one layer at a time"
    held = math.ceil(rows * (saved.kept + saved.again))
    yield Item("activations", held, ("update",), why, exact=False)
    kinds = {kind for chunk in plan.stages[stage] for kind in plan.sizes.kinds_in(chunk)}
    if not kinds:  # the stage holds only the embedding or the loss
        return
    widest = max(layer(plan, kind).whole for kind in kinds)
    why = "as much as one layer saves for its backward pass"
    yield Item("forward pass", math.ceil(rows * widest), ("logprobs",), why, exact=False)
    scratch = math.ceil(rows * mixer_scratch(plan, kinds))
    if any(kind.feed_forward == "moe" for kind in kinds):
        scratch = max(scratch, math.ceil(rows * dispatch_scratch(plan)))
    why = "gradients of a mixer, or copies of rows for experts that are evenly used"
    yield Item("scratch", scratch, ("update",), why, exact=False)


def logits_bytes(plan: Plan, rows: int) -> int:
    """Most bytes of logits and their gradients on a rank of the last stage, in an update whose
    largest microbatch has `rows`."""
    how = plan.logprob
    depths = 1 + plan.num_mtp_layers
    weight = plan.weight_bytes
    columns = plan.vocab_columns
    logits = rows * columns
    if how.head == "logits":
        return depths * logits * weight  # the gradient overwrites them
    # the float32 gradient overwrites the logits; products read a copy in the weights' dtype
    width = 4 if weight == 4 else 4 + weight
    if plan.objective.compares_distributions:  # the teacher's logits, log-probs, terms of the sum
        width += 4 * 5
    gradient = 4 * columns * plan.sizes.hidden_size if plan.loss_in_chunk else 0
    chunk = min(plan.head_chunk_bytes, logits * width)
    return chunk + min(how.cache_bytes, depths * logits * 2) + gradient


def _hidden_states(plan: Plan, teacher: Plan, load: Load) -> Item:
    """Host memory for a teacher's hidden states of the rows that this rank trains on in a step."""
    layout = plan.parallel
    ranks = layout.world_size // (layout.pp * layout.tp)
    size = teacher.sizes.hidden_size * teacher.weight_bytes * -(-load.tokens // ranks)
    why = (
        f"{teacher.sizes.hidden_size:,} numbers a row, this rank's share of {load.tokens:,} tokens"
    )
    name = "teacher's hidden states"
    return Item(name, size, PASSES, why, host=True, exact=ranks == 1)


def _routes(plan: Plan, stage: int, load: Load) -> Iterator[Item]:
    """Routed experts of this rank's layers: on the host those of its rows of the whole step; on the
    device those of the microbatch that computes (as sent, and gathered layer by layer) and those of
    the next one (as sent)."""
    routers = plan.router_layers
    replay = plan.replay
    if not (replay.enabled and routers):
        return
    local = [routers.index(i) for chunk in plan.stages[stage] for i in chunk.layers if i in routers]
    if not local:
        return
    a_layer = plan.sizes.route_bytes_per_token // len(routers)
    ranks = plan.parallel.world_size // plan.parallel.pp
    held = a_layer * len(local) * -(-load.tokens // ranks)
    why = f"of {len(local)} layers and this rank's share of {load.tokens:,} tokens"
    name = "routes of the batch"
    yield Item(name, held, MEMORY_PHASES[1:], why, host=True, exact=ranks == 1)
    if replay.of_trainer:
        yield Item("recorded routes", held, PASSES[:1], f"{why}, until the pass ends", exact=False)
    rows = -(-load.rows // plan.parallel.tp)
    sent = a_layer * (max(local) + 1 - min(local)) + 9
    used = (replay.old or replay.reference, replay.train)
    passes = tuple(name for name, on in zip(PASSES, used, strict=True) if on)
    why = f"{rows:,} rows as sent, with a row number and a flag, and as {len(local)} routers read"
    yield Item("routes", rows * (sent + a_layer * len(local)), passes, why)
    yield Item("routes ahead", rows * sent, passes, f"{rows:,} rows of the next microbatch")


# Weight sync ------------------------------------------------------------------------------------


def _gathered(plan: Plan) -> tuple[int, int, int]:
    """Bytes of the largest tensor, of a layer's experts, and of the bucket that holds either."""
    sizes = plan.sizes
    width = plan.weight_bytes
    largest = width * max(sizes.vocab_size, sizes.intermediate_size) * sizes.hidden_size
    experts = width * max(count.expert for count in layers(sizes))
    whole = width * (parameters(sizes).total + encoder_parameters(plan))
    return largest, experts, min(max(plan.rollout.bucket_bytes, largest, experts), whole)


def _publish(plan: Plan) -> Iterator[Item]:
    """Weights are gathered a bucket at a time. An engine in this process copies its tensors from
    the bucket; one in another process reads two buffers, filled in turn, which are kept from one
    sync to the next."""
    largest, experts, bucket = _gathered(plan)
    parallel = plan.parallel
    rollout = plan.rollout
    sent = max(bucket, rollout.bucket_bytes)
    held = largest + largest // plan.weight_bytes
    why = "the largest tensor and its check for nan"
    split = max(parallel.tp, parallel.pp, parallel.ep, parallel.etp_size) > 1
    if split or len(plan.grids["llm"].ranks) < plan.world_size:
        held += bucket
        why += ", a bucket"
        if rollout.engine == "vllm" and not (rollout.gpus or plan.remote_engines):
            held += experts
            why += ", one layer's experts (vLLM keeps them until it has all)"
    if plan.transport == "servers":
        held += sent
        why += ", a bucket on its way to the host"
    yield Item("publish", held, ("publish",), why, exact=False)
    copied = (published(plan).numbers + encoder_parameters(plan)) * plan.weight_bytes
    copied //= rollout.senders
    why = f"copy of what each of {rollout.senders} senders sends: rollout."
    if rollout.delta_sync:
        name = "weights sent before"
        with_changes = copied + 2 * sent
        note = f"{why}delta_sync; and changes of two buckets"
        yield Item(name, with_changes, MEMORY_PHASES, note, exact=False, host=True)
    if rollout.syncs_weights_in_background:
        phases = ("publish", *MEMORY_PHASES[1:3])
        name = "published weights"
        yield Item(name, copied, phases, f"{why}overlap_publish", exact=False, host=True)
    elif plan.transport != "inprocess":
        why = "two buckets on their way to the engine"
        host = plan.transport in ("shm", "servers")
        yield Item("send buffers", 2 * sent, MEMORY_PHASES, why, exact=False, host=host)
