"""Seconds of the trainer's forward and backward passes: computation, traffic and waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sumprod
from typing import Literal, NamedTuple

from pyrl_ext.plan.forecast.encoder import EncoderForecast, encoders
from pyrl_ext.plan.forecast.flops import chunk_flops
from pyrl_ext.plan.forecast.parameters import (
    adapters,
    chunk_parameters,
    rank_parameters,
    trained_parameters,
)
from pyrl_ext.plan.forecast.rounds import Bin, Round
from pyrl_ext.plan.model.attention import head_widths, kv_heads
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.families.blocks import Latent
from pyrl_ext.plan.model.hardware import Gpu, exchange_rate, group_rate
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.pipeline import EncoderPipeline, ahead_of, pipeline

# score: a forward pass for log-probs; forward, backward: the two passes of an update.
Work = Literal["score", "forward", "backward"]

# Kind of kernel -> the share of a data sheet's rate that it is assumed to reach, and why.
REACHED = {
    "projections": (0.6, "matrix products of thousands of rows"),
    "grouped experts": (0.5, "one grouped product for all experts of a rank"),
    "attention": (0.4, "packed causal attention, counting the unmasked half"),
    "scan": (0.25, "products within chunks of 64 to 256 rows, and with states"),
    "head": (0.4, "chunks whose float32 logits are written once and read twice"),
    "fp8": (0.45, "8-bit products, with the scaling of their inputs"),
    "memory": (0.8, "long sequential reads and writes"),
    "ring": (0.75, "collectives of tens of MB"),
    "exchange": (0.6, "all-to-all with parts of unequal size"),
    "host": (0.8, "pinned memory"),
}
MOVES = ("memory", "ring", "exchange", "host")  # kinds that move bytes; the others compute

# module of model.recompute_modules -> kinds of work that the backward pass computes again
RECOMPUTED = {
    "core_attn": frozenset({"attention", "context parallel"}),
    "moe": frozenset({"experts", "expert parallel"}),
    "moe_act": frozenset[str](),  # part of the memory traffic, counted there
}


def reached(kind: str, peak: float) -> float:
    """Amount of a kind of work per second, at a data sheet's rate of `peak`."""
    return REACHED[kind][0] * peak


class Spent(NamedTuple):
    """Time of one kind of work in a phase, averaged over pipeline stages."""

    name: str
    amount: float
    """Amount on one rank."""
    unit: str
    """FLOP, byte, tensor, layer (for one token), call, or % of the passes that stages wait."""
    seconds: float
    why: str
    """The rate, and why it is assumed."""
    phase: str = ""
    """Of the step."""

    @classmethod
    def at(cls, name: str, amount: float, kind: str, peak: float, note: str = "") -> Spent:
        """An amount of a kind of work, at a data sheet's rate of `peak`."""
        share, why = REACHED[kind]
        moves = kind in MOVES
        shown = f"{peak / 1e9:.4g} GB/s" if moves else f"{peak / 1e12:.4g} TFLOP/s"
        why = f"{note}{'; ' if note else ''}{share:.0%} of {shown}: {why}"
        return cls(name, amount, "byte" if moves else "FLOP", amount / reached(kind, peak), why)


def added(costs: Iterable[Spent]) -> list[Spent]:
    """Costs of the same name added up, if they take time; percentages are averaged by time."""
    totals: dict[str, Spent] = {}
    for more in costs:
        before = totals.get(more.name, more._replace(amount=0.0, seconds=0.0))
        amount = before.amount + more.amount
        seconds = before.seconds + more.seconds
        if more.unit == "%":
            weighted = before.amount * before.seconds + more.amount * more.seconds
            amount = weighted / seconds if seconds else 0.0
        totals[more.name] = more._replace(amount=amount, seconds=seconds)
    return [each for each in totals.values() if each.seconds]


# Work of a chunk --------------------------------------------------------------------------------


class ChunkWork(NamedTuple):
    """One kind of work of a model chunk on one rank."""

    name: str
    kind: str
    """Of `REACHED`."""
    peak: float
    """A data sheet's rate."""
    row: float = 0.0
    """Amount for every row of its bin."""
    pair: float = 0.0
    """Amount for every causal pair of query and key."""
    scored: float = 0.0
    """Amount for every scored row."""
    fixed: float = 0.0
    """Amount for a microbatch."""

    @property
    def amounts(self) -> tuple[float, ...]:
        """In the order of `Bin`."""
        return self[3:]

    @property
    def rate(self) -> float:
        """Amount per second."""
        return reached(self.kind, self.peak)


@dataclass(frozen=True)
class _Pass:
    """One pass over a model chunk; `cp` ranks share a sequence."""

    plan: Plan
    gpu: Gpu
    chunk: ModelChunk
    cp: int
    work: Work

    @property
    def backward(self) -> bool:
        return self.work == "backward"

    @cached_property
    def blocks(self) -> Counter[str]:
        """Number of mixers and of feed-forward parts of each kind."""
        kinds = self.plan.sizes.kinds_in(self.chunk)
        return Counter(block for kind in kinds for block in kind if block)

    @property
    def ranks(self) -> int:
        """Ranks that share a row's products."""
        return self.plan.parallel.tp * self.cp

    def again(self, name: str) -> bool:
        """True if this pass computes such work of the forward pass again."""
        modules = self.plan.recomputed_modules
        full = self.plan.model.recompute == "full"
        return self.backward and (full or any(name in RECOMPUTED[each] for each in modules))

    def times(self, name: str, frozen: bool = False) -> int:
        """Products of this pass for each of the forward pass: in the backward pass one for the
        gradient of the input, and one for that of the weight unless it is frozen."""
        return (2 - frozen if self.backward else 1) + self.again(name)

    def flop(self, name: str, kind: str, row: float = 0, pair: float = 0) -> ChunkWork:
        """Operations; in 8 bits where the plan has 8-bit products."""
        fp8 = self.plan.model.fp8 is not None and kind in ("projections", "grouped experts")
        peak = self.gpu.flops["fp8" if fp8 else self.plan.model.dtype]
        return ChunkWork(name, "fp8" if fp8 else kind, peak, row, pair)

    def sent(self, name: str, size: int, stride: int, row: float, kind: str = "ring") -> ChunkWork:
        """Bytes that a rank sends for a row in a group of `size` ranks `stride` apart."""
        peak = group_rate(self.gpu, self.plan.hardware.gpus_per_node, size, stride)
        return ChunkWork(name, kind, peak, row)


def chunk_parts(plan: Plan, gpu: Gpu, chunk: ModelChunk, cp: int, work: Work) -> list[ChunkWork]:
    """All work of one rank for one microbatch of a model chunk; `cp` ranks share a sequence."""
    if work == "score":
        chunk = replace(chunk, mtp=0)  # MTP layers are only trained
    one = _Pass(plan, gpu, chunk, cp, work)
    parts = [*_products(one), *_traffic(one), *_exchanged(one)]
    return [*parts, *_shared_sequences(one)] if cp > 1 else parts


def _products(of: _Pass) -> Iterator[ChunkWork]:
    forward = chunk_flops(of.plan.sizes, of.chunk)
    frozen = of.plan.lora is not None
    projections = forward.projections * of.times("projections", frozen) / of.ranks
    experts = forward.experts * of.times("experts", frozen) / of.ranks
    attention = forward.attention * of.times("attention") / of.ranks
    yield of.flop("projections", "projections", row=projections)
    yield of.flop("experts", "grouped experts", row=experts)
    yield of.flop("attention", "attention", pair=attention)
    yield of.flop("scan", "scan", row=forward.scan * of.times("scan") / of.ranks)
    yield _head(of, forward.head / of.ranks)


def _head(of: _Pass, each: float) -> ChunkWork:
    """The output projection: 6 T V H operations of an update if logits are kept or the loss is
    computed in the chunk, 8 if they are recomputed; 2 fewer without a gradient of the weight. A
    fused head scores only tokens with a loss, unless the loss function is the user's or all are
    recorded."""
    plan = of.plan
    frozen = plan.lora is not None
    how = plan.logprob
    every = how.head == "logits" or ":" in plan.objective.loss
    if of.work == "score":
        every = every or plan.scores_every_row
    logits = (
        2 * plan.vocab_columns * plan.batching.tokens_per_microbatch * (1 + plan.num_mtp_layers)
    )
    forward = 1.0
    backward = 3.0 - frozen - min(1.0, how.cache_bytes / logits)
    if how.head == "logits":
        backward = 2.0 - frozen
    elif plan.loss_in_chunk and of.work != "score":
        forward = 3.0 - frozen
        backward = 0.0
    amount = each * (backward if of.backward else forward)
    peak = of.gpu.flops[plan.model.dtype]
    return ChunkWork("head", "head", peak, row=amount * every, scored=amount * (not every))


def _traffic(of: _Pass) -> Iterator[ChunkWork]:
    """Memory traffic of adapters, between matrix products, and of the weights. An adapter reads its
    linear's input and adds to its output, which bounds it until ranks are of hundreds."""
    plan = of.plan
    sizes = plan.sizes
    width = plan.weight_bytes
    moved = 0.0
    for linear, rank in adapters(plan, sizes.kinds_in(of.chunk)):
        times = of.times("experts") * sizes.topk if linear.experts else of.times("projections")
        moved += times * (linear.inputs + 3 * linear.outputs + 2 * rank)
    yield ChunkWork("adapters", "memory", of.gpu.bandwidth, width * moved / of.ranks)
    # a block has a norm and a residual sum; attention rotates queries and keys
    elements = 5 * sizes.hidden_size * of.blocks.total()
    if sizes.rotary_width:
        elements += of.blocks["attention"] * 4 * sizes.num_attention_heads * head_widths(sizes)[0]
    # gate and up are read, their product is written
    elements += sizes.mlp_matrices * of.blocks["mlp"] * sizes.intermediate_size
    widths = sizes.topk * sizes.moe_intermediate_size + sizes.shared_expert_width
    # rows are sorted by expert and by rank on the way to the experts and back
    routed = sizes.mlp_matrices * widths + 8 * sizes.topk * sizes.hidden_size
    elements += of.blocks["moe"] * routed
    if mixer := sizes.state_mixer:  # around the convolution and the scan, and in the gated norm
        elements += of.blocks[mixer.name] * (3 * mixer.convolved + 4 * mixer.inner)
    times = of.times("memory")
    read = width * times * rank_parameters(plan, chunk_parameters(plan, of.chunk)).total
    if of.backward:  # a gradient is written, read, and added to the float32 sum
        trained = rank_parameters(plan, trained_parameters(plan, of.chunk)).total
        read += (2 * width + 8) * trained
    elements *= times
    if of.backward and "moe_act" in plan.recomputed_modules:
        inner = sizes.topk * sizes.moe_intermediate_size
        elements += of.blocks["moe"] * sizes.mlp_matrices * inner
    row = width * elements / of.ranks
    yield ChunkWork("memory", "memory", of.gpu.bandwidth, row, fixed=read)


def _exchanged(of: _Pass) -> Iterator[ChunkWork]:
    """Bytes that a rank sends in a pass to tensor- and expert-parallel ranks."""
    parallel = of.plan.parallel
    sizes = of.plan.sizes
    tp = parallel.tp
    ep = parallel.ep
    etp = parallel.etp_size
    routers = of.blocks["moe"]
    hidden = of.plan.weight_bytes * sizes.hidden_size
    # mixers, and dense or shared feed-forward parts: an all-gather before, a reduce-scatter after;
    # the backward pass gathers the input once more
    blocks = of.blocks.total() - (0 if sizes.shared_expert_width else routers)
    times = (1.25 if of.backward else 1) + of.again("tensor parallel")
    row = 2 * blocks * times * hidden * (tp - 1) / tp / of.cp
    yield of.sent("tensor parallel", tp, 1, row)
    times = 1 + of.again("expert parallel")
    copies = 2 * times * routers * sizes.topk * hidden / of.ranks  # to their experts and back
    if ep > 1:
        peak = exchange_rate(of.gpu, of.plan.hardware.gpus_per_node, ep, etp)
        yield ChunkWork("expert parallel", "exchange", peak, copies * (ep - 1) / ep)
    yield of.sent("expert tensor parallel", etp, 1, copies * (etp - 1))


def _shared_sequences(of: _Pass) -> Iterator[ChunkWork]:
    """Work because `cp` ranks share a sequence: attention gathers latents, or keys and values (an
    all-gather forward, a reduce-scatter backward); mixers with a state exchange rows for heads."""
    plan = of.plan
    sizes = plan.sizes
    tp = plan.parallel.tp
    cp = of.cp
    others = (cp - 1) / cp
    attending = of.blocks["attention"]
    key, value = head_widths(sizes)
    elements = kv_heads(plan, tp) * (key + max(key, value))  # narrower values are padded
    if plan.gathers_latents and isinstance(sizes, Latent):
        latent = sizes.kv_lora_rank + sizes.qk_rope_head_dim
        elements = latent / tp
        passes = 2 if of.backward else 1
        # rows of the other ranks; the backward pass gathers latents once more
        times = passes + of.again("attention")
        row = attending * times * of.plan.weight_bytes * latent * (tp - 1) / tp * others
        yield of.sent("tensor parallel", tp, 1, row)
        # own rows are among the projections, also where the backward pass recomputes all of these
        heads = sizes.num_attention_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        times = passes * others
        if of.again("projections"):
            times += others
        elif of.again("attention"):  # core attention starts with the latents
            times += 1
        row = attending * times * 2 * sizes.kv_lora_rank * heads / tp
        yield of.flop("latents", "projections", row=row)
    sent = of.plan.weight_bytes * attending * elements * others * (1 + of.again("context parallel"))
    yield of.sent("context parallel", cp, tp, sent)
    if mixer := sizes.state_mixer:
        row = of.plan.weight_bytes * (mixer.inputs + mixer.inner) / of.ranks * others
        row *= of.blocks[mixer.name] * (1 + of.again("projections"))
        yield of.sent("heads for rows", cp, tp, row, "exchange")


# Rounds -----------------------------------------------------------------------------------------


def pass_costs(run: Passes, rounds: Sequence[Round], works: Sequence[Work]) -> list[Spent]:
    """Costs of the rounds of a batch: of forward passes alone, or with backward passes.

    A round takes as long as its slowest bin, since routed experts make ranks wait for each other.
    """
    parallel = run.plan.parallel
    pp = parallel.pp
    if parallel.vpp_size > 1:  # interleaved schedules pad to whole rounds of pp microbatches
        rounds = [*rounds, *[Round(parallel.cp, (Bin(0, 0, 0),))] * (-len(rounds) % pp)]
    slowest = [(turn.cp, run.slowest(turn)) for turn in rounds]
    costs: list[Spent] = []
    for cp in dict.fromkeys(turn.cp for turn in rounds):
        together = Bin(*map(sum, zip(*(of for size, of in slowest if size == cp), strict=True)))
        for chunk in run.chunks:
            for part in (part for work in works for part in run.priced(chunk, cp, work).parts):
                amount = sumprod(part.amounts, together) / pp
                costs.append(Spent.at(part.name, amount, part.kind, part.peak))
    found = added(costs)
    if pp > 1:
        busy = sum(each.seconds for each in found)
        whole = run.ends(slowest, works)
        why = f"stages wait for each other: {len(rounds)} microbatches"
        found.append(Spent("bubble", 100 * (1 - busy / whole), "%", whole - busy, why))
    return [*found, *_waits(run, slowest, works)]


def _waits(
    run: Passes, rounds: Sequence[tuple[int, Bin]], works: Sequence[Work]
) -> Iterator[Spent]:
    """The time that the language model waits for an encoder, both pipelines on one timeline; and
    that of an encoder on its first stage."""
    plan = run.plan
    scores = "score" in works
    back = 2 + (plan.model.recompute == "full")
    for encoder in encoders(plan):
        parts = 1 if scores else plan.batching.minibatches
        patches = encoder.patches(parts * len(rounds))
        if not patches:
            continue
        alone = run.ends(rounds, works)
        joined = run.ends(rounds, works, _ahead(encoder, run.gpu, patches, back))
        why = f"{patches:,.0f} patches of a microbatch on a rank"
        if encoder.shared:
            times = 1 + (0 if scores or not encoder.module.train else back)
            amount = times * len(rounds) * patches * encoder.patch_flops
            yield Spent(encoder.name, amount, "FLOP", joined - alone, why)
        else:
            share = 100 * (1 - alone / joined)
            yield Spent(f"wait for {encoder.name}", share, "%", joined - alone, why)


def _ahead(encoder: EncoderForecast, gpu: Gpu, patches: float, back: int) -> EncoderPipeline:
    """An encoder's passes, before the first stage or inside it. `back`: forward passes in the time
    of a backward pass."""
    own = encoder.parallel.pp
    parallel = encoder.plan.parallel
    took = [encoder_seconds(encoder, gpu, patches, stage) for stage in range(own)]
    return EncoderPipeline(
        0 if encoder.shared else own,
        ahead_of(parallel.pp, parallel.vpp),
        lambda stage, *_: took[stage],
        (lambda stage, *_: back * took[stage]) if encoder.module.train else None,
    )


def encoder_seconds(encoder: EncoderForecast, gpu: Gpu, patches: float, stage: int) -> float:
    """Seconds of a stage's forward pass over `patches` on a rank."""
    peak = gpu.flops[encoder.plan.model.dtype]
    products, scores = encoder.flops(stage)
    seconds = products / reached("projections", peak) + scores / reached("attention", peak)
    return patches * seconds / encoder.parallel.tp


class Priced(NamedTuple):
    """The work of a chunk."""

    parts: list[ChunkWork]
    rates: list[float]
    """Seconds for a row, a pair, a scored row and a microbatch."""


class Passes:
    """Prices the passes of a plan, each chunk once."""

    def __init__(self, plan: Plan, gpu: Gpu) -> None:
        self.plan = plan
        self.gpu = gpu
        self.chunks = [chunk for stage in plan.stages for chunk in stage]
        self._priced: dict[tuple[ModelChunk, int, Work], Priced] = {}

    def priced(self, chunk: ModelChunk, cp: int, work: Work) -> Priced:
        """The work of a chunk, and seconds of it."""
        key = (chunk, cp, work)
        if key not in self._priced:
            parts = chunk_parts(self.plan, self.gpu, chunk, cp, work)
            seconds = ([each / part.rate for each in part.amounts] for part in parts)
            self._priced[key] = Priced(parts, [sum(each) for each in zip(*seconds, strict=True)])
        return self._priced[key]

    def rates(self, cp: int, works: Sequence[Work]) -> list[float]:
        """Seconds of all chunks for a row, a pair, a scored row and a microbatch."""
        found = (self.priced(chunk, cp, work).rates for chunk in self.chunks for work in works)
        return [sum(each) for each in zip(*found, strict=True)]

    def slowest(self, of: Round) -> Bin:
        """The bin whose forward pass through all stages takes longest."""
        if len(of.bins) == 1:
            return of.bins[0]
        rates = self.rates(of.cp, ["score"])
        return max(of.bins, key=lambda each: sumprod(rates, each))

    def ends(
        self,
        rounds: Sequence[tuple[int, Bin]],
        works: Sequence[Work],
        encoder: EncoderPipeline | None = None,
    ) -> float:
        """Seconds until the last rank has finished all (cp, bin), with an encoder if given."""
        parallel = self.plan.parallel
        stages = self.plan.stages

        def took(work: Work) -> Callable[[int, int, int], float]:
            def seconds(rank: int, chunk: int, number: int) -> float:
                cp, of = rounds[number]
                return sumprod(self.priced(stages[rank][chunk], cp, work).rates, of)

            return seconds

        rows = max(of.rows / cp for cp, of in rounds)
        sent = rows * self.plan.sizes.hidden_size * self.plan.weight_bytes / parallel.tp
        stride = parallel.world_size // parallel.pp
        peak = group_rate(self.gpu, self.plan.hardware.gpus_per_node, parallel.pp, stride)
        slots = pipeline(
            parallel.pp,
            parallel.vpp_size,
            len(rounds),
            took(works[0]),
            took("backward") if "backward" in works else None,
            sent / reached("ring", peak),
            encoder,
        )
        return max(slot.end for slot in slots)
