"""Estimated time of a step, by phase and by kind of work, with the assumption behind each number.

Samples have the lengths of `workload.step_samples`. Work is counted exactly; the share of a data
sheet's rate that kernels and links reach is assumed (`parts.REACHED`). Routed experts are
assumed to be evenly used. The embedding, host work and kernel launches are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pyrl_ext.plan.forecast.compute_time import Passes, Spent, pass_costs
from pyrl_ext.plan.forecast.encoder import Encoder, encoder_parameters, encoders
from pyrl_ext.plan.forecast.flops import model_flops
from pyrl_ext.plan.forecast.hardware import Gpu, gpu_of, group_rate
from pyrl_ext.plan.forecast.lora import adapter_flops, published_numbers, whole_chunk
from pyrl_ext.plan.forecast.measured import in_use
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.parameters import (
    copies,
    optimizer_parameters,
    rank_parameters,
    stage_parameters,
    trained_of_stage,
)
from pyrl_ext.plan.forecast.parts import reached, sources
from pyrl_ext.plan.forecast.publishing import engine_costs
from pyrl_ext.plan.forecast.rollout_time import rollout_costs
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.forecast.workload import (
    Round,
    even_rounds,
    lengths_of,
    step_rounds,
    step_samples,
    update_rounds,
)
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.phases import OFFLOADED
from pyrl_ext.plan.plan import Plan

ERROR = "never compared with a run on GPUs: the shares of the data sheets' rates are assumptions"
CALIBRATED = "never compared with a run on GPUs: some rates were measured, each for itself"


@dataclass(frozen=True)
class Cost:
    """Time of one kind of work in a phase, on one rank, averaged over pipeline stages."""

    phase: str
    name: str
    amount: float
    """Amount on one rank."""
    unit: str
    """FLOP, byte, layer (for one token), or % of the passes that stages wait."""
    seconds: float
    why: str
    """The rate, and why it is assumed."""


@dataclass(frozen=True)
class StepTime:
    """Time of one rollout step; its phases do not overlap."""

    costs: tuple[Cost, ...]
    """Costs of every phase; they add up to its time."""
    model_flops: float
    """FLOPs of the update on all ranks, forward and backward, without recomputation."""
    peak: float
    """Peak rate of all ranks [FLOP/s]."""
    assumed: tuple[str, ...]
    """Assumptions behind all costs, in sentences."""
    error: str = field(default_factory=lambda: CALIBRATED if in_use() else ERROR)
    """How far estimates were off where they were compared with runs."""

    def seconds(self, phase: str) -> float:
        """Seconds of one phase."""
        return sum(cost.seconds for cost in self.costs if cost.phase == phase)

    def of(self, phase: str, name: str) -> float:
        """Seconds of one cost of a phase."""
        return sum(cost.seconds for cost in self.costs if (cost.phase, cost.name) == (phase, name))

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def trainer(self) -> float:
        """Seconds of the trainer's passes: without publish and rollout."""
        return self.total - self.seconds("publish") - self.seconds("rollout")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the update."""
        return self.model_flops / (self.seconds("update") * self.peak)


def step_time(plan: Plan) -> StepTime | None:
    """The estimate for a plan; None if it names no GPU."""
    gpu = gpu_of(plan)
    if gpu is None:
        return None
    run = Passes(plan, gpu)
    scored = ()
    if plan.has_rollouts:
        scored = (*pass_costs(run, step_rounds(plan), ["score"]), *_image_rows(plan, gpu, 1))
    costs = (
        *_phase("publish", _publish(plan, gpu)),
        *_phase("rollout", rollout_costs(plan, gpu)),
        *_phase("old_logprobs", scored),
        *_phase("ref_logprobs", scored if plan.objective.kl_coef else ()),
        *_phase("update", _together(_update(run))),
    )
    peak = plan.world_size * gpu.flops["fp8" if plan.model.fp8 else plan.model.dtype]
    return StepTime(costs, update_flops(plan), peak, tuple(_assumed(plan)))


def quick_seconds(plan: Plan) -> float:
    """Rough seconds of the trainer's passes in a step, with equal microbatches: sorts many plans
    before a few are priced exactly. Raises ValueError if the plan names no GPU."""
    gpu = gpu_of(plan)
    if gpu is None:
        raise ValueError("quick_seconds: hardware.gpu is null, expected a GPU")
    run = Passes(plan, gpu, quick=True)
    number = plan.batching.minibatches
    scored = sum(each.seconds for each in pass_costs(run, even_rounds(plan, 1), ["score"]))
    updates = sum(each.seconds for each in minibatch_costs(run, even_rounds(plan, number)))
    passes = plan.has_rollouts + (plan.objective.kl_coef > 0)
    return passes * scored + number * updates


def update_flops(plan: Plan) -> float:
    """Model FLOPs of a step's updates on all ranks: a forward pass, and for the backward pass the
    same for each gradient that a product has, over the rows and causal pairs of the samples without
    padding."""
    samples = step_samples(plan)
    rows = sum(s.rows for s in samples)
    scored = sum(s.response for s in samples)
    pairs = sum(s.rows * (s.rows + 1) / 2 for s in samples)
    each = model_flops(plan.sizes, plan.num_mtp_layers)
    ours = 3 * each.of(rows, pairs, scored)
    if plan.lora is not None:  # no gradients of frozen weights
        ours += 3 * adapter_flops(plan, whole_chunk(plan)) * rows - each.of(rows, 0, scored)
    return ours + sum(each.update_flops for each in encoders(plan))


def _phase(phase: str, spent: Iterable[Spent]) -> Iterator[Cost]:
    return (Cost(phase, *each) for each in spent if each.seconds)


def _together(spent: Iterable[Spent]) -> Iterator[Spent]:
    """Add up costs of the same name; percentages are averaged by time."""
    totals: dict[str, Spent] = {}
    for each in spent:
        old = totals.get(each.name)
        if old is not None:
            amount = old.amount + each.amount
            seconds = old.seconds + each.seconds
            if each.unit == "%":
                weighted = old.amount * old.seconds + each.amount * each.seconds
                amount = weighted / seconds if seconds else 0.0
            each = each._replace(amount=amount, seconds=seconds)
        totals[each.name] = each
    return iter(totals.values())


def _assumed(plan: Plan) -> Iterator[str]:
    samples = step_samples(plan)
    prompt = sum(s.prompt for s in samples) / len(samples)
    response = sum(s.response for s in samples) / len(samples)
    yield (
        f"{len(samples)} samples of {prompt:,.0f} + {response:,.0f} tokens on average "
        f"({lengths_of(plan)}), the longest with {max(s.rows for s in samples):,} rows"
    )
    yield "routed experts are evenly used; every microbatch is as slow as its slowest rank"
    for each in encoders(plan):
        yield (
            f"{each.name}: {plan.estimate.images:g} images of {plan.estimate.image_patches:,} "
            f"patches in a sample (estimate), whole images spread over {each.parallel.dp} replicas"
        )
    yield from sources()
    yield "left out: the embedding, host work, kernel launches, evaluation, checkpoints"


# Publish -----------------------------------------------------------------------------------------


def _publish(plan: Plan, gpu: Gpu) -> Iterator[Spent]:
    """Every rank gathers the model, bucket by bucket, and its engine reads a part of it; where
    engines are apart, their senders share it out. With adapters only what they change is sent,
    after the first publish."""
    if plan.rollout.engine not in ("hf", "vllm"):
        return
    whole = parameters(plan.sizes).total
    each = DTYPE_BYTES[plan.model.dtype]
    total = published_numbers(plan) + encoder_parameters(plan)
    held = min(rank_parameters(plan, stage).total for stage in stage_parameters(plan))
    held *= published_numbers(plan) / whole  # of what is sent as of the rest
    node = plan.hardware.gpus_per_node
    rate, why = reached("ring", group_rate(gpu, node, plan.world_size, 1), "byte")
    if plan.lora_publish:
        why = f"{plan.lora_publish}: {total / whole:.1%} of all numbers; {why}"
    gathered = each * max(0.0, total / plan.rollout.senders - held)
    yield Spent.at("gather weights", gathered, "byte", rate, why)
    taken = total * DTYPE_BYTES[plan.rollout_dtype] / plan.rollout.tp
    if plan.remote_engines:
        yield from engine_costs(plan, gpu, gathered / rate)
    elif plan.rollout.gpus is None:
        rate, why = reached("memory", gpu.bandwidth, "byte")
        yield Spent.at("load weights", 2 * taken, "byte", rate, f"read and written; {why}")
    else:
        rate, why = reached("ring", gpu.network, "byte")
        yield Spent.at("send weights", taken, "byte", rate, f"to the engine's GPUs; {why}")
    if OFFLOADED[plan.rollout.offload_trainer]:
        offloaded = max(
            sum(item.bytes for item in stage.items if item.name.endswith(" on the host"))
            for stage in stage_memory(plan)
        )
        rate, why = reached("host", gpu.host, "byte")
        why = f"to the host and back; {why}"
        yield Spent.at("offload trainer", 2 * offloaded, "byte", rate, why)


# Update ------------------------------------------------------------------------------------------


def _update(run: Passes) -> Iterator[Spent]:
    for rounds in update_rounds(run.plan):
        yield from minibatch_costs(run, rounds)


def minibatch_costs(run: Passes, rounds: tuple[Round, ...]) -> Iterator[Spent]:
    """Forward and backward passes, and an optimizer step."""
    plan = run.plan
    gpu = run.gpu
    stages = range(plan.parallel.pp)
    held = [rank_parameters(plan, trained_of_stage(plan, stage)).total for stage in stages]
    held[0] += sum(each.on_rank(0) for each in _encoders_at(plan, 0))
    largest = held.index(max(held))
    computed = pass_costs(run, rounds, ["forward", "backward"])
    yield from computed
    yield from _image_rows(plan, gpu, plan.batching.minibatches, back=True)
    yield from _activations(plan, gpu, rounds)
    last = sum(each.seconds for each in computed) * 2 / 3 / len(rounds)
    yield from _gradients(plan, gpu, largest, last)
    yield from _optimizer(plan, gpu, largest)


def _image_rows(plan: Plan, gpu: Gpu, parts: int, back: bool = False) -> Iterator[Spent]:
    """Rows of images from the encoders' replicas to the shards that embed them: one of `parts` of a
    step's, and with `back` their gradients, if the encoder is trained."""
    for each in encoders(plan):
        replicas = each.parallel.dp
        readers = plan.parallel.dp * plan.parallel.cp * plan.parallel.tp
        rows = each.step_patches / each.tower.merge**2 / replicas / parts
        away = 1 - 1 / readers if each.shared else 1  # the rest stays on its rank
        ways = 2 if back and each.module.train else 1
        moved = rows * each.row_width * DTYPE_BYTES[plan.model.dtype] * ways * away
        rate, why = reached(
            "ring", group_rate(gpu, plan.hardware.gpus_per_node, plan.world_size, 1), "byte"
        )
        yield Spent.at("rows of images", moved, "byte", rate, f"from a replica; {why}")


def _encoders_at(plan: Plan, stage: int) -> list[Encoder]:
    """Encoders whose gradients and optimizer state are on the ranks of a stage."""
    return [each for each in encoders(plan) if each.shared and each.module.train and stage == 0]


def _activations(plan: Plan, gpu: Gpu, rounds: tuple[Round, ...]) -> Iterator[Spent]:
    """Activations that model.offload_layers moves to the host and back."""
    if not plan.model.offload_layers:
        return
    held = sum(stage.bytes_of("offloaded activations") for stage in stage_memory(plan))
    full = plan.batching.tokens_per_microbatch
    share = sum(max(of.rows for of in each.bins) / each.cp / full for each in rounds)
    rate, why = reached("host", gpu.host, "byte")
    why = f"to the host and back, nothing overlaps; {why}"
    yield Spent.at("offload activations", 2 * held * share, "byte", rate, why)


def _gradients(plan: Plan, gpu: Gpu, stage: int, last: float) -> Iterator[Spent]:
    """Float32 gradients are summed over the ranks that hold the same weights, and with a
    distributed optimizer the updated weights are gathered.

    `last`: seconds of the last backward pass, which can hide the sums.
    """
    parallel = plan.parallel
    node = plan.hardware.gpus_per_node
    held = rank_parameters(plan, trained_of_stage(plan, stage))
    weight, (dense_copies, expert_copies) = DTYPE_BYTES[plan.model.dtype], copies(plan)
    summed = gathered = summing = gathering = 0.0
    why = ""
    # parameters, ranks that hold them, and the distance between these ranks
    groups = (
        (held.dense, dense_copies, parallel.tp),
        (held.expert, expert_copies, parallel.ep * parallel.etp_size),
        *((each.on_rank(0), each.parallel.dp, 1) for each in _encoders_at(plan, stage)),
    )
    for count, size, stride in groups:
        if size == 1 or not count:
            continue
        rate, why = reached("ring", group_rate(gpu, node, size, stride), "byte")
        share = (size - 1) / size
        sums = 4 * count * share * (1 if plan.optimizer.distributed else 2)
        back = weight * count * share * plan.optimizer.distributed
        summed = summed + sums
        gathered = gathered + back
        summing = summing + sums / rate
        gathering = gathering + back / rate
    if plan.optimizer.overlap_grad_reduce:
        summing = max(0.0, summing - last)
        why = f"beyond the last backward pass; {why}"
    yield Spent("reduce gradients", summed, "byte", summing, f"float32; {why}")
    yield Spent("gather weights", gathered, "byte", gathering, why)


def _optimizer(plan: Plan, gpu: Gpu, stage: int) -> Iterator[Spent]:
    """AdamW reads gradient, weight and two moments and writes the last three, in float32, and
    writes the model's weights. Before, gradients are set to zero and their norm is computed."""
    weight = DTYPE_BYTES[plan.model.dtype]
    stored = trained_of_stage(plan, stage)
    encoding = _encoders_at(plan, stage)
    held = rank_parameters(plan, stored).total + sum(each.on_rank(0) for each in encoding)
    stepped = optimizer_parameters(plan, stored) + sum(each.stepped(0) for each in encoding)
    on_host = stepped * plan.optimizer.offload
    rate, why = reached("memory", gpu.bandwidth, "byte")
    moved = 8 * held + (28 + weight) * (stepped - on_host)
    yield Spent.at("optimizer", moved, "byte", rate, f"28 + {weight} bytes a parameter; {why}")
    rate, why = reached("host", gpu.host, "byte")
    why = f"host memory is taken to be as fast as the link to it, nothing overlaps; {why}"
    moved = (28 + 4 + weight) * on_host
    yield Spent.at("optimizer on the host", moved, "byte", rate, why)
