"""Estimated time of a step, by phase and by kind of work, with the assumption behind each number.

Samples have the lengths of `workload.step_samples`. Work is counted exactly; the share of a data
sheet's rate that kernels and links reach is assumed (`compute_time.REACHED`). Routed experts are
assumed to be evenly used. The embedding, host work and kernel launches are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pyrl_ext.plan.forecast.compute_time import Passes, Spent, add_spent, pass_costs, reached
from pyrl_ext.plan.forecast.encoder import Encoder, encoder_parameters, encoders
from pyrl_ext.plan.forecast.flops import update_flops
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.parameters import (
    copies,
    optimizer_parameters,
    published_numbers,
    rank_parameters,
    stage_parameters,
    trained_of_stage,
)
from pyrl_ext.plan.forecast.rollout_time import rollout_costs
from pyrl_ext.plan.forecast.workload import Round, step_rounds, step_samples, update_rounds
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.hardware import BROADCAST, TCP, Gpu, gpu_of, group_rate
from pyrl_ext.plan.model.units import DTYPE_BYTES
from pyrl_ext.plan.phases import OFFLOADED
from pyrl_ext.plan.plan import Plan

ERROR = "never compared with a run on GPUs: the shares of the data sheets' rates are assumptions"


class Cost(NamedTuple):
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
    error: str = ERROR
    """How far estimates were off where they were compared with runs."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that take time, in order."""
        return tuple(dict.fromkeys(cost.phase for cost in self.costs))

    def seconds(self, phase: str) -> float:
        """Seconds of one phase."""
        return sum(cost.seconds for cost in self.costs if cost.phase == phase)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(cost.seconds for cost in self.costs)

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
    updates: dict[str, Spent] = {}
    for rounds in update_rounds(plan):
        for spent in minibatch_costs(run, rounds):
            add_spent(updates, spent)
    costs = (
        *_phase("publish", _publish(plan, gpu)),
        *_phase("rollout", rollout_costs(plan, gpu)),
        *_phase("old_logprobs", scored),
        *_phase("ref_logprobs", scored if plan.objective.kl_coef else ()),
        *_phase("update", updates.values()),
    )
    peak = plan.world_size * gpu.flops["fp8" if plan.model.fp8 else plan.model.dtype]
    return StepTime(costs, update_flops(plan), peak, tuple(_assumed(plan)))


def _phase(phase: str, costs: Iterable[Spent]) -> Iterator[Cost]:
    return (Cost(phase, *spent) for spent in costs if spent.seconds)


def _assumed(plan: Plan) -> Iterator[str]:
    samples = step_samples(plan)
    prompt = sum(s.prompt for s in samples) / len(samples)
    response = sum(s.response for s in samples) / len(samples)
    yield (
        f"{len(samples)} samples of {prompt:,.0f} + {response:,.0f} tokens on average (estimate), "
        f"the longest with {max(s.rows for s in samples):,} rows"
    )
    yield "routed experts are evenly used; every microbatch is as slow as its slowest rank"
    for encoder in encoders(plan):
        yield (
            f"{encoder.name}: {plan.estimate.images:g} images of {plan.estimate.image_patches:,} "
            "patches in a sample (estimate)"
        )
    yield "left out: the embedding, host work, kernel launches, evaluation, checkpoints"


# Weight sync -------------------------------------------------------------------------------------


def _publish(plan: Plan, gpu: Gpu) -> Iterator[Spent]:
    """Every rank gathers the model, bucket by bucket, and its engine reads a part of it; senders
    share it out to remote engines. With adapters only what they change is sent, after the first
    sync."""
    if plan.rollout.engine not in ("hf", "vllm"):
        return
    published = published_numbers(plan)
    total = published + encoder_parameters(plan)
    width = DTYPE_BYTES[plan.model.dtype]
    held = min(rank_parameters(plan, stage).total for stage in stage_parameters(plan))
    held *= published / parameters(plan.sizes).total  # of what is sent as of the rest
    peak = group_rate(gpu, plan.hardware.gpus_per_node, plan.world_size, 1)
    rate, why = reached("ring", peak, "byte")
    gathered = width * max(0.0, total / plan.rollout.senders - held)
    yield Spent.at("gather weights", gathered, "byte", rate, why)
    taken = total * DTYPE_BYTES[plan.rollout_dtype] / plan.rollout.tp
    if plan.remote_engines:
        yield _sent_to_servers(plan, gpu, width * total, gathered / rate)
        rate, why = reached("host", gpu.host, "byte")
        yield Spent.at("load weights", taken, "byte", rate, f"from the engine's host; {why}")
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


def _sent_to_servers(plan: Plan, gpu: Gpu, whole: int, gathering: float) -> Spent:
    """`rollout.senders` ranks send `whole` bytes to all remote engines while they gather them."""
    engines = plan.num_engines
    if plan.rollout.transport == "broadcast":
        sent = float(whole)
        seconds = whole / min(BROADCAST, gpu.network)
        why = f"to {engines} engines at once by NCCL, overlaps with gathering; rate assumed"
    else:
        sent = whole / plan.rollout.senders * engines
        # an engine takes from all senders at once, by the one adapter that its address has
        seconds = max(sent / min(TCP, gpu.network), whole / gpu.network)
        why = f"to {engines} engines by TCP, overlaps with gathering; rate assumed"
    return Spent("send weights", sent, "byte", max(0.0, seconds - gathering), why)


# Update ------------------------------------------------------------------------------------------


def minibatch_costs(run: Passes, rounds: tuple[Round, ...]) -> Iterator[Spent]:
    """Forward and backward passes, and an optimizer step of the largest stage."""
    plan = run.plan
    gpu = run.gpu
    on_first = [each for each in encoders(plan) if each.shared and each.module.train]
    stages = range(plan.parallel.pp)
    held = [rank_parameters(plan, trained_of_stage(plan, stage)).total for stage in stages]
    held[0] += sum(encoder.on_rank(0) for encoder in on_first)
    largest = held.index(max(held))
    towers = on_first if largest == 0 else []
    computed = pass_costs(run, rounds, ["forward", "backward"])
    yield from computed
    yield from _image_rows(plan, gpu, plan.batching.minibatches, back=True)
    last = sum(spent.seconds for spent in computed) * 2 / 3 / len(rounds)
    yield from _gradients(plan, gpu, largest, towers, last)
    yield _optimizer(plan, gpu, largest, towers)


def _image_rows(plan: Plan, gpu: Gpu, parts: int, back: bool = False) -> Iterator[Spent]:
    """Rows of images from the encoders' replicas to the shards that embed them: one of `parts` of a
    step's, and with `back` their gradients, if the encoder is trained."""
    for encoder in encoders(plan):
        readers = plan.parallel.dp * plan.parallel.cp * plan.parallel.tp
        rows = encoder.step_patches / encoder.tower.merge**2 / encoder.parallel.dp / parts
        away = 1 - 1 / readers if encoder.shared else 1  # the rest stays on its rank
        ways = 2 if back and encoder.module.train else 1
        moved = rows * encoder.row_width * DTYPE_BYTES[plan.model.dtype] * ways * away
        peak = group_rate(gpu, plan.hardware.gpus_per_node, plan.world_size, 1)
        rate, why = reached("ring", peak, "byte")
        yield Spent.at("rows of images", moved, "byte", rate, f"from a replica; {why}")


def _gradients(
    plan: Plan, gpu: Gpu, stage: int, towers: list[Encoder], last: float
) -> Iterator[Spent]:
    """Float32 gradients are summed over the ranks that hold the same weights, and with a
    distributed optimizer the updated weights are gathered.

    `last`: seconds of the last backward pass, which can hide the sums.
    """
    parallel = plan.parallel
    held = rank_parameters(plan, trained_of_stage(plan, stage))
    dense_copies, expert_copies = copies(plan)
    distributed = plan.optimizer.distributed
    summed = gathered = summing = gathering = 0.0
    why = ""
    # parameters, ranks that hold them, and the distance between these ranks
    groups = [
        (held.dense, dense_copies, parallel.tp),
        (held.expert, expert_copies, parallel.ep * parallel.etp_size),
        *((encoder.on_rank(0), encoder.parallel.dp, 1) for encoder in towers),
    ]
    for count, size, stride in groups:
        if size == 1 or not count:
            continue
        peak = group_rate(gpu, plan.hardware.gpus_per_node, size, stride)
        rate, why = reached("ring", peak, "byte")
        share = (size - 1) / size
        sums = 4 * count * share * (1 if distributed else 2)
        back = DTYPE_BYTES[plan.model.dtype] * count * share * distributed
        summed += sums
        gathered += back
        summing += sums / rate
        gathering += back / rate
    if plan.optimizer.overlap_grad_reduce:
        summing = max(0.0, summing - last)
        why = f"beyond the last backward pass; {why}"
    yield Spent("reduce gradients", summed, "byte", summing, f"float32; {why}")
    yield Spent("gather weights", gathered, "byte", gathering, why)


def _optimizer(plan: Plan, gpu: Gpu, stage: int, towers: list[Encoder]) -> Spent:
    """AdamW reads gradient, weight and two moments and writes the last three, in float32, and
    writes the model's weights. Before, gradients are set to zero and their norm is computed."""
    weight = DTYPE_BYTES[plan.model.dtype]
    stored = trained_of_stage(plan, stage)
    held = rank_parameters(plan, stored).total + sum(each.on_rank(0) for each in towers)
    stepped = optimizer_parameters(plan, stored) + sum(each.stepped(0) for each in towers)
    rate, why = reached("memory", gpu.bandwidth, "byte")
    moved = 8 * held + (28 + weight) * stepped
    return Spent.at("optimizer", moved, "byte", rate, f"28 + {weight} bytes a parameter; {why}")
