"""Seconds of the trainer's forward and backward passes: computation, traffic and waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from pyrl_ext.plan.forecast.encoder import Encoder, encoders
from pyrl_ext.plan.forecast.flops import chunk_flops
from pyrl_ext.plan.forecast.parameters import (
    chunk_parameters,
    rank_parameters,
    trained_parameters,
)
from pyrl_ext.plan.forecast.workload import Bin, Round
from pyrl_ext.plan.model.attention import head_widths, kv_heads
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.families.blocks import Latent
from pyrl_ext.plan.model.hardware import Gpu, exchange_rate, group_rate
from pyrl_ext.plan.model.layer_kinds import LayerKind
from pyrl_ext.plan.model.lora import adapted
from pyrl_ext.plan.model.units import DTYPE_BYTES
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.pipeline import Ahead, ahead_of, pipeline

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


class Spent(NamedTuple):
    """Time of one kind of work, averaged over pipeline stages."""

    name: str
    amount: float
    unit: str
    seconds: float
    why: str

    @classmethod
    def at(cls, name: str, amount: float, unit: str, rate: float, why: str) -> Spent:
        """An amount at a rate per second."""
        return cls(name, amount, unit, amount / rate, why)


def reached(kind: str, peak: float, unit: str = "FLOP") -> tuple[float, str]:
    """(rate, the assumption in words) of a kind of kernel."""
    share, why = REACHED[kind]
    shown = f"{peak / 1e12:.4g} TFLOP/s" if unit == "FLOP" else f"{peak / 1e9:.4g} GB/s"
    return share * peak, f"{share:.0%} of {shown}: {why}"


# Work of a chunk --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One kind of work of a model chunk on one rank."""

    name: str
    unit: Literal["FLOP", "byte"]
    rate: float
    """Amount per second."""
    why: str
    fixed: float = 0.0
    """Amount for a microbatch."""
    row: float = 0.0
    """Amount for every row of its bin."""
    pair: float = 0.0
    """Amount for every causal pair of query and key."""
    scored: float = 0.0
    """Amount for every scored row."""

    def amount(self, of: Bin, microbatches: int) -> float:
        """The amount for `microbatches` whose rows add up to `of`."""
        fixed = self.fixed * microbatches
        return fixed + self.row * of.rows + self.pair * of.pairs + self.scored * of.scored


def computed_again(plan: Plan) -> frozenset[str]:
    """Kinds of work that the backward pass recomputes."""
    if plan.model.recompute == "none":
        return frozenset()
    selected = {"attention", "experts", "context parallel", "expert parallel"}
    if plan.model.recompute == "full":
        selected |= {"projections", "scan", "memory", "tensor parallel"}
    return frozenset(selected)


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
    def kinds(self) -> Sequence[LayerKind]:
        return self.plan.sizes.kinds_in(self.chunk)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.plan.model.dtype]

    @property
    def ranks(self) -> int:
        """Ranks that share a row's products."""
        return self.plan.parallel.tp * self.cp

    def again(self, name: str) -> bool:
        """True if this pass computes such work of the forward pass again."""
        return self.backward and name in computed_again(self.plan)

    def times(self, name: str, frozen: bool = False) -> int:
        """Products of this pass for each of the forward pass: in the backward pass one for the
        gradient of the input, and one for that of the weight unless it is frozen."""
        return (2 - frozen if self.backward else 1) + self.again(name)

    def flop(self, name: str, kind: str, row: float = 0, pair: float = 0) -> Part:
        """Operations; in 8 bits where the plan has 8-bit products."""
        fp8 = self.plan.model.fp8 is not None and kind in ("projections", "grouped experts")
        peak = self.gpu.flops["fp8" if fp8 else self.plan.model.dtype]
        return Part(name, "FLOP", *reached("fp8" if fp8 else kind, peak), row=row, pair=pair)

    def sent(self, name: str, size: int, stride: int, row: float, kind: str = "ring") -> Part:
        """Bytes that a rank sends for a row in a group of `size` ranks `stride` apart."""
        peak = group_rate(self.gpu, self.plan.hardware.gpus_per_node, size, stride)
        return Part(name, "byte", *reached(kind, peak, "byte"), row=row)


def chunk_parts(plan: Plan, gpu: Gpu, chunk: ModelChunk, cp: int, work: Work) -> list[Part]:
    """All work of one rank for one microbatch of a model chunk; `cp` ranks share a sequence."""
    if work == "score":
        chunk = replace(chunk, mtp=0)  # MTP layers are only trained
    one = _Pass(plan, gpu, chunk, cp, work)
    parts = [*_products(one), *_adapters(one), _memory(one), *_exchanged(one)]
    return parts + _shared_sequences(one) if cp > 1 else parts


def _products(of: _Pass) -> list[Part]:
    forward = chunk_flops(of.plan.sizes, of.chunk)
    frozen = of.plan.lora is not None
    projections = forward.projections * of.times("projections", frozen) / of.ranks
    experts = forward.experts * of.times("experts", frozen) / of.ranks
    attention = forward.attention * of.times("attention") / of.ranks
    return [
        of.flop("projections", "projections", row=projections),
        of.flop("experts", "grouped experts", row=experts),
        of.flop("attention", "attention", pair=attention),
        of.flop("scan", "scan", row=forward.scan * of.times("scan") / of.ranks),
        _head(of, forward.head / of.ranks),
    ]


def _head(of: _Pass, each: float) -> Part:
    """The output projection: 6 T V H operations of an update if logits are kept or the loss is
    computed in the chunk, 8 if they are recomputed; 2 fewer without a gradient of the weight. A
    fused head scores only tokens with a loss, unless the loss function is the user's."""
    plan = of.plan
    frozen = plan.lora is not None
    how = plan.logprob
    every = how.head == "logits" or of.work == "score" or ":" in plan.objective.loss
    columns = -(-plan.sizes.vocab_size // plan.parallel.tp)
    logits = 2 * columns * plan.batching.tokens_per_microbatch * (1 + plan.num_mtp_layers)
    forward = 1.0
    backward = 3.0 - frozen - min(1.0, how.cache_bytes / logits)
    if how.head == "logits":
        backward = 2.0 - frozen
    elif how.loss_in_chunk and of.work != "score":
        forward = 3.0 - frozen
        backward = 0.0
    amount = each * (backward if of.backward else forward)
    rate = reached("head", of.gpu.flops[plan.model.dtype])
    return Part("head", "FLOP", *rate, row=amount * every, scored=amount * (not every))


def _adapters(of: _Pass) -> list[Part]:
    """The adapters of a chunk: each reads its linear's input and adds to its output. The memory
    traffic of that bounds it until ranks are of hundreds."""
    lora = of.plan.lora
    if lora is None:
        return []
    sizes = of.plan.sizes
    moved = 0.0
    for kind, number in Counter(of.kinds).items():
        for linear in adapted(sizes, lora, kind):
            times = number * (sizes.topk if linear.experts else 1)
            times *= of.times("experts" if linear.experts else "projections")
            rank = lora.rank_of(linear.experts > 0)
            moved += times * (linear.inputs + 3 * linear.outputs + 2 * rank)
    rate = reached("memory", of.gpu.bandwidth, "byte")
    return [Part("adapters", "byte", *rate, row=of.width * moved / of.ranks)]


def _memory(of: _Pass) -> Part:
    """Memory traffic between matrix products, and of the weights."""
    plan = of.plan
    sizes = plan.sizes
    routers = sum(kind.feed_forward == "moe" for kind in of.kinds)
    dense = sum(kind.feed_forward == "mlp" for kind in of.kinds)
    attending = sum(kind.mixer == "attention" for kind in of.kinds)
    # a block has a norm and a residual sum; attention rotates queries and keys
    elements = 5 * sizes.hidden_size * sum(kind.blocks for kind in of.kinds)
    if sizes.rotary_width:
        elements += attending * 4 * sizes.num_attention_heads * head_widths(sizes)[0]
    # gate and up are read, their product is written
    elements += sizes.mlp_matrices * dense * sizes.intermediate_size
    widths = sizes.topk * sizes.moe_intermediate_size + sizes.shared_expert_width
    # rows are sorted by expert and by rank on the way to the experts and back
    elements += routers * (sizes.mlp_matrices * widths + 8 * sizes.topk * sizes.hidden_size)
    if mixer := sizes.state_mixer:  # around the convolution and the scan, and in the gated norm
        states = sum(kind.has_state for kind in of.kinds)
        elements += states * (3 * mixer.convolved + 4 * mixer.inner)
    times = of.times("memory")
    read = of.width * times * rank_parameters(plan, chunk_parameters(plan, of.chunk)).total
    if of.backward:  # a gradient is written, read, and added to the float32 sum
        trained = rank_parameters(plan, trained_parameters(plan, of.chunk)).total
        read += (2 * of.width + 8) * trained
    rate = reached("memory", of.gpu.bandwidth, "byte")
    return Part("memory", "byte", *rate, fixed=read, row=of.width * elements * times / of.ranks)


def _exchanged(of: _Pass) -> list[Part]:
    """Bytes that a rank sends in a pass to tensor- and expert-parallel ranks."""
    parallel = of.plan.parallel
    sizes = of.plan.sizes
    tp = parallel.tp
    ep = parallel.ep
    etp = parallel.etp_size
    routers = sum(kind.feed_forward == "moe" for kind in of.kinds)
    hidden = of.width * sizes.hidden_size
    parts = []
    if tp > 1:
        # mixers, and dense or shared feed-forward parts: an all-gather before, a reduce-scatter
        # after; the backward pass gathers the input once more
        blocks = sum(kind.blocks for kind in of.kinds)
        blocks -= 0 if sizes.shared_expert_width else routers
        times = (1.25 if of.backward else 1) + of.again("tensor parallel")
        row = 2 * blocks * times * hidden * (tp - 1) / tp / of.cp
        parts.append(of.sent("tensor parallel", tp, 1, row))
    times = 1 + of.again("expert parallel")
    copies = 2 * times * routers * sizes.topk * hidden / of.ranks  # to their experts and back
    if ep > 1:
        peak = exchange_rate(of.gpu, of.plan.hardware.gpus_per_node, ep, etp)
        rate = reached("exchange", peak, "byte")
        parts.append(Part("expert parallel", "byte", *rate, row=copies * (ep - 1) / ep))
    if etp > 1:
        parts.append(of.sent("expert tensor parallel", etp, 1, copies * (etp - 1)))
    return parts


def _shared_sequences(of: _Pass) -> list[Part]:
    """Work because `cp` ranks share a sequence: attention gathers latents, or keys and values (an
    all-gather forward, a reduce-scatter backward); mixers with a state exchange rows for heads."""
    plan = of.plan
    sizes = plan.sizes
    tp = plan.parallel.tp
    cp = of.cp
    others = (cp - 1) / cp
    attending = sum(kind.mixer == "attention" for kind in of.kinds)
    key, value = head_widths(sizes)
    elements = kv_heads(plan, tp) * (key + max(key, value))  # narrower values are padded
    parts = []
    if plan.gathers_latents and isinstance(sizes, Latent):
        latent = sizes.kv_lora_rank + sizes.qk_rope_head_dim
        elements = latent / tp
        passes = 2 if of.backward else 1
        if tp > 1:  # rows of the other ranks; the backward pass gathers latents once more
            times = passes + of.again("attention")
            row = attending * times * of.width * latent * (tp - 1) / tp * others
            parts.append(of.sent("tensor parallel", tp, 1, row))
        # own rows are among the projections, also where the backward pass recomputes all of these
        heads = sizes.num_attention_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        times = passes * others
        if of.again("projections"):
            times += others
        elif of.again("attention"):  # core attention starts with the latents
            times += 1
        row = attending * times * 2 * sizes.kv_lora_rank * heads / tp
        parts.append(of.flop("latents", "projections", row=row))
    sent = of.width * attending * elements * others * (1 + of.again("context parallel"))
    parts.append(of.sent("context parallel", cp, tp, sent))
    if mixer := sizes.state_mixer:
        states = sum(kind.has_state for kind in of.kinds)
        row = of.width * (mixer.inputs + mixer.inner) / of.ranks * others
        row *= states * (1 + of.again("projections"))
        parts.append(of.sent("heads for rows", cp, tp, row, "exchange"))
    return parts


# Rounds -----------------------------------------------------------------------------------------


def pass_costs(run: Passes, rounds: Sequence[Round], works: Sequence[Work]) -> list[Spent]:
    """Costs of the rounds of a batch: of forward passes alone, or with backward passes.

    A round takes as long as its slowest bin, since routed experts make ranks wait for each other.
    """
    plan = run.plan
    pp = plan.parallel.pp
    if plan.parallel.vpp_size > 1:  # interleaved schedules pad to whole rounds of pp microbatches
        rounds = [*rounds, *[Round(plan.parallel.cp, (Bin(0, 0, 0),))] * (-len(rounds) % pp)]
    slowest = [(turn.cp, run.slowest(turn)) for turn in rounds]
    spent: dict[str, Spent] = {}
    for cp in dict.fromkeys(turn.cp for turn in rounds):
        bins = [of for size, of in slowest if size == cp]
        together = Bin(*map(sum, zip(*bins, strict=True)))
        for chunk in run.chunks:
            for part in (part for work in works for part in run.priced(chunk, cp, work).parts):
                amount = part.amount(together, len(bins)) / pp
                added = Spent.at(part.name, amount, part.unit, part.rate, part.why)
                add_spent(spent, added)
    found = [each for each in spent.values() if each.seconds]
    if pp > 1:
        busy = sum(each.seconds for each in found)
        whole = run.ends(slowest, works)
        why = f"stages wait for each other: {len(rounds)} microbatches"
        found.append(Spent("bubble", 100 * (1 - busy / whole), "%", whole - busy, why))
    return [*found, *_waits(run, slowest, works)]


def add_spent(totals: dict[str, Spent], more: Spent) -> None:
    """Add up costs of the same name; percentages are averaged by time."""
    before = totals.get(more.name, more._replace(amount=0.0, seconds=0.0))
    amount = before.amount + more.amount
    seconds = before.seconds + more.seconds
    if more.unit == "%":
        weighted = before.amount * before.seconds + more.amount * more.seconds
        amount = weighted / seconds if seconds else 0.0
    totals[more.name] = more._replace(amount=amount, seconds=seconds)


def _waits(
    run: Passes, rounds: Sequence[tuple[int, Bin]], works: Sequence[Work]
) -> Iterator[Spent]:
    """The time that the language model waits for an encoder, both pipelines on one timeline; and
    that of an encoder on its first stage."""
    for encoder in encoders(run.plan):
        patches = run.patches(encoder, len(rounds), works)
        if not patches:
            continue
        alone = run.ends(rounds, works)
        joined = run.ends(rounds, works, encoder)
        why = f"{patches:,.0f} patches of a microbatch on a rank"
        if encoder.shared:
            times = 1
            if "score" not in works and encoder.module.train:
                times = 3 + (run.plan.model.recompute == "full")
            amount = times * len(rounds) * patches * encoder.patch_flops
            yield Spent(encoder.name, amount, "FLOP", joined - alone, why)
        else:
            share = 100 * (1 - alone / joined)
            yield Spent(f"wait for {encoder.name}", share, "%", joined - alone, why)


def encoder_seconds(encoder: Encoder, gpu: Gpu, patches: float, stage: int) -> float:
    """Seconds of a stage's forward pass over `patches` on a rank."""
    peak = gpu.flops[encoder.plan.model.dtype]
    products, scores = encoder.flops(stage)
    seconds = products / reached("projections", peak)[0] + scores / reached("attention", peak)[0]
    return patches * seconds / encoder.parallel.tp


class Priced(NamedTuple):
    """The work of a chunk."""

    parts: list[Part]
    rates: tuple[float, ...]
    """Seconds for a microbatch, a row, a pair and a scored row."""


class Passes:
    """Prices the passes of a plan; equal chunks are priced once."""

    def __init__(self, plan: Plan, gpu: Gpu) -> None:
        self.plan = plan
        self.gpu = gpu
        self.chunks = [chunk for stage in plan.stages for chunk in stage]
        self._priced: dict[tuple[object, int, Work], Priced] = {}
        self._keys = {id(chunk): self._key(chunk) for chunk in self.chunks}

    def _key(self, chunk: ModelChunk) -> object:
        """Equal for chunks with the same work."""
        kinds = [self.plan.sizes.layer_kinds[layer] for layer in chunk.layers]
        return frozenset(Counter(kinds).items()), chunk.mtp, chunk.embedding, chunk.loss

    def priced(self, chunk: ModelChunk, cp: int, work: Work) -> Priced:
        """The work of a chunk, and seconds of it."""
        key = (self._keys[id(chunk)], cp, work)
        if key not in self._priced:
            parts = chunk_parts(self.plan, self.gpu, chunk, cp, work)
            seconds = [
                [amount / part.rate for amount in (part.fixed, part.row, part.pair, part.scored)]
                for part in parts
            ]
            self._priced[key] = Priced(parts, tuple(map(sum, zip(*seconds, strict=True))))
        return self._priced[key]

    def seconds(self, chunk: ModelChunk, cp: int, of: Bin, work: Work) -> float:
        """Seconds of one microbatch."""
        fixed, row, pair, scored = self.priced(chunk, cp, work).rates
        return fixed + row * of.rows + pair * of.pairs + scored * of.scored

    def slowest(self, of: Round) -> Bin:
        """The bin whose forward pass through all stages takes longest."""
        if len(of.bins) == 1:
            return of.bins[0]
        rates = [self.priced(chunk, of.cp, "score").rates for chunk in self.chunks]
        _, row, pair, scored = map(sum, zip(*rates, strict=True))
        return max(of.bins, key=lambda b: row * b.rows + pair * b.pairs + scored * b.scored)

    def patches(self, encoder: Encoder, microbatches: int, works: Sequence[Work]) -> float:
        """Patches of a microbatch on the replica of an encoder that has most."""
        parts = 1 if "score" in works else self.plan.batching.minibatches
        return encoder.patches(parts * microbatches)

    def _ahead(self, encoder: Encoder, microbatches: int, works: Sequence[Work]) -> Ahead:
        """An encoder's passes, before the first stage or inside it."""
        patches = self.patches(encoder, microbatches, works)
        times = 2 + (self.plan.model.recompute == "full")

        def forward(rank: int, chunk: int, microbatch: int) -> float:
            return encoder_seconds(encoder, self.gpu, patches, rank)

        def backward(rank: int, chunk: int, microbatch: int) -> float:
            return times * forward(rank, chunk, microbatch)

        parallel = self.plan.parallel
        stages = 0 if encoder.shared else encoder.parallel.pp
        ahead = ahead_of(parallel.pp, parallel.vpp)
        return Ahead(stages, ahead, forward, backward if encoder.module.train else None)

    def ends(
        self,
        rounds: Sequence[tuple[int, Bin]],
        works: Sequence[Work],
        encoder: Encoder | None = None,
    ) -> float:
        """Seconds until the last rank has finished all (cp, bin), with an encoder if given."""
        parallel = self.plan.parallel
        stages = self.plan.stages

        def took(work: Work) -> Callable[[int, int, int], float]:
            return lambda rank, chunk, number: self.seconds(
                stages[rank][chunk], *rounds[number], work
            )

        rows = max(of.rows / cp for cp, of in rounds)
        width = DTYPE_BYTES[self.plan.model.dtype]
        sent = rows * self.plan.sizes.hidden_size * width / parallel.tp
        stride = parallel.world_size // parallel.pp
        peak = group_rate(self.gpu, self.plan.hardware.gpus_per_node, parallel.pp, stride)
        passes = [took(work) for work in works]
        slots = pipeline(
            parallel.pp,
            parallel.vpp_size,
            len(rounds),
            passes[0],
            passes[1] if len(passes) > 1 else None,
            sent / reached("ring", peak, "byte")[0],
            self._ahead(encoder, len(rounds), works) if encoder else None,
        )
        return max(slot.end for slot in slots)
