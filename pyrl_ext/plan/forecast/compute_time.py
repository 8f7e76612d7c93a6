"""Seconds of the trainer's forward and backward passes: computation, traffic and waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pyrl_ext.plan.forecast.attention import head_widths
from pyrl_ext.plan.forecast.cp_gather import gather_parts
from pyrl_ext.plan.forecast.encoder import Encoder, encoders
from pyrl_ext.plan.forecast.flops import chunk_flops
from pyrl_ext.plan.forecast.hardware import Gpu, exchange_rate, group_rate
from pyrl_ext.plan.forecast.lora import adapter_parts
from pyrl_ext.plan.forecast.parameters import (
    chunk_parameters,
    rank_parameters,
    trained_parameters,
)
from pyrl_ext.plan.forecast.parts import Part, Work, computed_again, reached
from pyrl_ext.plan.forecast.state_layers import state_elements, state_exchange
from pyrl_ext.plan.forecast.units import DTYPE_BYTES, duration
from pyrl_ext.plan.forecast.workload import Bin, Round
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.pipeline import Ahead, ahead_of, pipeline


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


def pass_costs(run: Passes, rounds: Sequence[Round], works: Sequence[Work]) -> list[Spent]:
    """Costs of the rounds of a batch: of forward passes alone, or with backward passes.

    A round takes as long as its slowest bin, since routed experts make ranks wait for each other.
    """
    plan = run.plan
    pp = run.plan.parallel.pp
    if plan.parallel.vpp_size > 1:  # interleaved schedules pad to whole rounds of pp microbatches
        rounds = [*rounds, *[Round(plan.parallel.cp, (Bin(0, 0, 0),))] * (-len(rounds) % pp)]
    slowest = [(each.cp, run.slowest(each)) for each in rounds]
    spent: dict[str, Spent] = {}
    for cp in dict.fromkeys(each.cp for each in rounds):
        bins = [of for size, of in slowest if size == cp]
        together = Bin(*map(sum, zip(*bins, strict=True)))
        for chunk in (chunk for stage in plan.stages for chunk in stage):
            for part in (part for work in works for part in run.parts(chunk, cp, work)):
                _add(spent, part, part.amount(together, len(bins)) / pp)
    found = [each for each in spent.values() if each.seconds]
    if pp > 1:
        busy = sum(each.seconds for each in found)
        whole = run.ends(slowest, works)
        why = (
            f"stages wait for each other: {len(rounds)} microbatches in "
            f"{plan.parallel.vpp_size} chunks a stage"
        )
        found.append(Spent("bubble", 100 * (1 - busy / whole), "%", whole - busy, why))
    return [*found, *_waits(run, slowest, works)]


def _waits(
    run: Passes, rounds: Sequence[tuple[int, Bin]], works: Sequence[Work]
) -> Iterator[Spent]:
    """The time that the language model waits for an encoder, both pipelines on one timeline; and
    that of an encoder on its first stage."""
    for encoder in () if run.quick else encoders(run.plan):
        if not (patches := run.patches(encoder, len(rounds), works)):
            continue
        alone, joined = (run.ends(rounds, works, each) for each in (None, encoder))
        slowest = [Round(cp, (of,)) for cp, of in rounds]
        theirs, ours = run.pace(encoder, slowest, works)
        if encoder.shared:
            times = 1 if "score" in works else encoder.passes + run.again(encoder)
            why = (
                f"a forward pass of stage 0 takes {duration(theirs)} of {encoder.name} "
                f"({patches:,.0f} patches a rank) beside {duration(ours)} of the language model"
            )
            amount = times * len(rounds) * patches * encoder.patch_flops
            yield Spent(encoder.name, amount, "FLOP", joined - alone, why)
            continue
        slower = encoder.name if theirs > ours else "the language model"
        why = (
            f"a forward pass of a stage takes {duration(theirs)} of {encoder.name} ({patches:,.0f} "
            f"patches a rank) and {duration(ours)} of the language model: {slower} sets the pace"
        )
        share = 100 * (1 - alone / joined)
        yield Spent(f"wait for {encoder.name}", share, "%", joined - alone, why)


def _add(spent: dict[str, Spent], part: Part, amount: float) -> None:
    before = spent.get(part.name, Spent(part.name, 0.0, part.unit, 0.0, part.why))
    seconds = before.seconds + amount / part.rate
    spent[part.name] = before._replace(amount=before.amount + amount, seconds=seconds)


class Passes:
    """Prices the passes of a plan; equal chunks are priced once."""

    def __init__(self, plan: Plan, gpu: Gpu, quick: bool = False) -> None:
        """`quick`: use the closed form for a pipeline of equal passes instead of its schedule."""
        self.plan = plan
        self.gpu = gpu
        self.quick = quick
        self._parts: dict[tuple, list[Part]] = {}
        self._rates: dict[tuple, tuple[float, ...]] = {}
        self._whole: dict[int, tuple[float, ...]] = {}
        kinds = plan.sizes.layer_kinds
        self._kinds = {
            id(chunk): (
                frozenset(Counter(kinds[layer] for layer in chunk.layers).items()),
                chunk.mtp,
                chunk.embedding,
                chunk.loss,
            )
            for stage in plan.stages
            for chunk in stage
        }

    def parts(self, chunk: ModelChunk, cp: int, work: Work) -> list[Part]:
        key = (self._kinds[id(chunk)], cp, work)
        if key not in self._parts:
            self._parts[key] = chunk_parts(self.plan, self.gpu, chunk, cp, work)
        return self._parts[key]

    def rates(self, chunk: ModelChunk, cp: int, work: Work) -> tuple[float, ...]:
        """Seconds for a microbatch, a row, a pair and a scored row."""
        key = (self._kinds[id(chunk)], cp, work)
        if key not in self._rates:
            of_part = [
                [amount / part.rate for amount in (part.fixed, part.row, part.pair, part.scored)]
                for part in self.parts(chunk, cp, work)
            ]
            self._rates[key] = tuple(map(sum, zip(*of_part, strict=True)))
        return self._rates[key]

    def seconds(self, chunk: ModelChunk, cp: int, of: Bin, work: Work) -> float:
        """Seconds of one microbatch."""
        fixed, row, pair, scored = self.rates(chunk, cp, work)
        return fixed + row * of.rows + pair * of.pairs + scored * of.scored

    def slowest(self, of: Round) -> Bin:
        """The bin whose forward pass through all stages takes longest."""
        if len(of.bins) == 1:
            return of.bins[0]
        if of.cp not in self._whole:
            chunks = [chunk for stage in self.plan.stages for chunk in stage]
            rates = [self.rates(chunk, of.cp, "score") for chunk in chunks]
            self._whole[of.cp] = tuple(map(sum, zip(*rates, strict=True)))
        _, row, pair, scored = self._whole[of.cp]
        return max(of.bins, key=lambda b: row * b.rows + pair * b.pairs + scored * b.scored)

    def patches(self, encoder: Encoder, microbatches: int, works: Sequence[Work]) -> float:
        """Patches of a microbatch on the replica of an encoder that has most."""
        parts = 1 if "score" in works else self.plan.batching.minibatches
        return encoder.patches(parts * microbatches)

    def again(self, encoder: Encoder) -> bool:
        """True if an encoder computes its forward pass again in the backward pass."""
        return encoder.module.train and self.plan.model.recompute == "full"

    def pace(
        self, encoder: Encoder, rounds: Sequence[Round], works: Sequence[Work] = ("forward",)
    ) -> tuple[float, float]:
        """Seconds of a forward pass of the slowest stage: of an encoder, of the language model;
        where they share ranks, of its first stage."""
        patches = self.patches(encoder, len(rounds), works)
        theirs = max(encoder.seconds(self.gpu, patches, i) for i in range(len(encoder.layers)))
        ours = max(
            sum(self.seconds(chunk, each.cp, self.slowest(each), works[0]) for chunk in stage)
            for stage in self.plan.stages[: 1 if encoder.shared else None]
            for each in rounds
        )
        return theirs, ours

    def _ahead(self, encoder: Encoder, microbatches: int, works: Sequence[Work]) -> Ahead:
        patches = self.patches(encoder, microbatches, works)
        again = self.again(encoder)

        def took(rank: int, chunk: int, microbatch: int) -> float:
            return encoder.seconds(self.gpu, patches, rank)

        back = (lambda *at: (2 + again) * took(*at)) if encoder.module.train else None
        stages = 0 if encoder.shared else encoder.parallel.pp
        return Ahead(stages, ahead_of(self.plan.parallel.pp, self.plan.parallel.vpp), took, back)

    def ends(
        self,
        rounds: Sequence[tuple[int, Bin]],
        works: Sequence[Work],
        encoder: Encoder | None = None,
    ) -> float:
        """Seconds until the last rank has finished all (cp, bin), with an encoder if given: before
        the first stage, or inside it."""
        stages = self.plan.stages
        parallel = self.plan.parallel
        sizes = self.plan.sizes

        def took(work: Work) -> Callable[[int, int, int], float]:
            return lambda rank, chunk, number: self.seconds(
                stages[rank][chunk], *rounds[number], work
            )

        if self.quick:
            one = [
                sum(self.seconds(chunk, *rounds[0], work) for chunk in stage for work in works)
                for stage in stages
            ]
            return max(one) * len(rounds) + (sum(one) - max(one)) / parallel.vpp_size
        rows = max(of.rows / cp for cp, of in rounds)
        sent = rows * sizes.hidden_size * DTYPE_BYTES[self.plan.model.dtype] / parallel.tp
        apart = parallel.world_size // parallel.pp
        rate = group_rate(self.gpu, self.plan.hardware.gpus_per_node, parallel.pp, apart)
        passes = [took(work) for work in works]
        slots = pipeline(
            parallel.pp,
            parallel.vpp_size,
            len(rounds),
            passes[0],
            passes[1] if len(passes) > 1 else None,
            sent / reached("ring", rate, "byte")[0],
            self._ahead(encoder, len(rounds), works) if encoder else None,
        )
        return max(slot.end for slot in slots)


def chunk_parts(plan: Plan, gpu: Gpu, chunk: ModelChunk, cp: int, work: Work) -> list[Part]:
    """All work of one rank for one microbatch of a model chunk; `cp` ranks share a sequence."""
    if work == "score":
        chunk = replace(chunk, mtp=0)  # MTP layers are only trained
    again = computed_again(plan) if work == "backward" else frozenset()
    found = [
        *_products(plan, gpu, chunk, cp, work, again),
        *adapter_parts(plan, gpu, chunk, cp, work, again),
        *_memory(plan, gpu, chunk, cp, work, again),
    ]
    return found + _exchanged(plan, gpu, chunk, cp, work, again)


def _products(
    plan: Plan, gpu: Gpu, chunk: ModelChunk, cp: int, work: Work, again: frozenset[str]
) -> list[Part]:
    each = chunk_flops(plan.sizes, chunk)
    ranks = plan.parallel.tp * cp
    dtype = "fp8" if plan.model.fp8 else plan.model.dtype

    def share(name: str, frozen: bool = plan.lora is not None) -> float:
        """This rank's share of the forward pass's operations, times the passes over them: backward
        one for the gradient of the input, and one for that of the weight unless it is frozen."""
        return (2 - frozen if work == "backward" else 1) / ranks + (name in again) / ranks

    wide = gpu.flops[dtype]
    plain = gpu.flops[plan.model.dtype]
    return [
        Part("projections", "FLOP", *reached("fp8" if plan.model.fp8 else "projections", wide),
             row=each.projections * share("projections")),
        Part("experts", "FLOP", *reached("fp8" if plan.model.fp8 else "grouped experts", wide),
             row=each.experts * share("experts")),
        Part("attention", "FLOP", *reached("attention", plain),
             pair=each.attention * share("attention", frozen=False)),
        Part("scan", "FLOP", *reached("scan", plain), row=each.scan * share("scan", frozen=False)),
        _head(plan, plain, each.head / ranks, work),
    ]  # fmt: skip


def _head(plan: Plan, peak: float, each: float, work: Work) -> Part:
    """The output projection: 6 T V H operations of an update if logits are kept or the loss is
    computed in the chunk, 8 if they are recomputed; 2 fewer without a gradient of the weight. A
    fused head scores only tokens with a loss, unless the loss function is the user's."""
    frozen = plan.lora is not None
    how = plan.logprob
    rate = reached("head", peak)
    every = how.head == "logits" or work == "score" or ":" in plan.objective.loss
    columns = -(-plan.sizes.vocab_size // plan.parallel.tp)
    logits = 2 * columns * plan.batching.tokens_per_microbatch * (1 + plan.num_mtp_layers)
    if work == "score":
        times = 1.0
    elif how.head == "logits":
        times = 1.0 if work == "forward" else 2.0 - frozen
    elif how.loss_in_chunk:
        times = 3.0 - frozen if work == "forward" else 0.0
    else:
        times = 1.0 if work == "forward" else 3.0 - frozen - min(1.0, how.cache_bytes / logits)
    amount = each * times
    return Part("head", "FLOP", *rate, row=amount * every, scored=amount * (not every))


def _memory(
    plan: Plan, gpu: Gpu, chunk: ModelChunk, cp: int, work: Work, again: frozenset[str]
) -> list[Part]:
    """Memory traffic between matrix products, and of the weights."""
    sizes = plan.sizes
    parallel = plan.parallel
    held = chunk_parameters(plan, chunk)
    each = DTYPE_BYTES[plan.model.dtype]
    kinds = plan.sizes.kinds_in(chunk)
    routers, dense = (sum(k.feed_forward == each for k in kinds) for each in ("moe", "mlp"))
    attending = sum(kind.mixer == "attention" for kind in kinds)
    # a block has a norm and a residual sum; attention rotates queries and keys
    elements = 5 * sizes.hidden_size * sum(kind.blocks for kind in kinds)
    if sizes.rotary_width:
        elements += attending * 4 * sizes.num_attention_heads * head_widths(sizes)[0]
    # gate and up are read, their product is written
    elements += sizes.mlp_matrices * dense * sizes.intermediate_size
    widths = sizes.topk * sizes.moe_intermediate_size + sizes.shared_expert_width
    # rows are sorted by expert and by rank on the way to the experts and back
    elements += routers * (sizes.mlp_matrices * widths + 8 * sizes.topk * sizes.hidden_size)
    elements += state_elements(plan, chunk)
    times = 1 if work != "backward" else 2 + ("memory" in again)
    weights = rank_parameters(plan, held).total
    trained = rank_parameters(plan, trained_parameters(plan, chunk)).total
    read = each * weights * times
    if work == "backward":  # a gradient is written, read, and added to the float32 sum
        read += (2 * each + 8) * trained
    rate = reached("memory", gpu.bandwidth, "byte")
    row = each * elements * times / (parallel.tp * cp)
    return [Part("memory", "byte", *rate, fixed=read, row=row)]


def _exchanged(
    plan: Plan, gpu: Gpu, chunk: ModelChunk, cp: int, work: Work, again: frozenset[str]
) -> list[Part]:
    """Bytes that a rank sends in a pass, by process group."""
    parallel = plan.parallel
    sizes = plan.sizes
    node = plan.hardware.gpus_per_node
    tp = parallel.tp
    ep = parallel.ep
    etp = parallel.etp_size
    kinds = plan.sizes.kinds_in(chunk)
    layers = sum(kind.mixer == "attention" for kind in kinds)
    routers = sum(kind.feed_forward == "moe" for kind in kinds)
    each = DTYPE_BYTES[plan.model.dtype]
    hidden = each * sizes.hidden_size
    found = []
    if tp > 1:
        # mixers, and dense or shared feed-forward parts: an all-gather before, a reduce-scatter
        # after; the backward pass gathers the input once more
        blocks = sum(kind.blocks for kind in kinds)
        shared = blocks - (0 if sizes.shared_expert_width else routers)
        times = (1.25 if work == "backward" else 1) + ("tensor parallel" in again)
        row = 2 * shared * times * hidden * (tp - 1) / tp / cp
        rate = reached("ring", group_rate(gpu, node, tp, 1), "byte")
        found.append(Part("tensor parallel", "byte", *rate, row=row))
    times = 1 + ("expert parallel" in again)
    copies = routers * sizes.topk * hidden / (tp * cp)  # a rank's rows, sent to their experts
    if ep > 1:
        rate = reached("exchange", exchange_rate(gpu, node, ep, etp), "byte")
        row = 2 * times * copies * (ep - 1) / ep  # there and back
        found.append(Part("expert parallel", "byte", *rate, row=row))
    if etp > 1:
        rate = reached("ring", group_rate(gpu, node, etp, 1), "byte")
        row = 2 * times * copies * (etp - 1)
        found.append(Part("expert tensor parallel", "byte", *rate, row=row))
    if cp > 1:
        found += gather_parts(plan, gpu, cp, work, layers)
        found += state_exchange(plan, gpu, cp, chunk, again)
    return found
