"""How long a step takes, phase by phase, and from what: an estimate with all it assumes.

Samples have the lengths of `lengths.step_samples`. Work is counted exactly; what kernels and links
reach of a data sheet is assumed (`passes.REACHED`). Routed experts are taken as evenly used. The
embedding, the host's work and the launch of kernels are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyrl_ext.plan.forecast.compute_time import Passes, Spent, local_parameters, pass_costs, reached
from pyrl_ext.plan.forecast.flops import model_flops
from pyrl_ext.plan.forecast.hardware import Gpu, gpu_of, group_rate
from pyrl_ext.plan.forecast.memory import DTYPE_BYTES, stage_memory, stage_parameters
from pyrl_ext.plan.forecast.rollout_time import rollout_costs
from pyrl_ext.plan.forecast.workload import (
    Round,
    even_rounds,
    step_rounds,
    step_samples,
    update_rounds,
)
from pyrl_ext.plan.model.sizes import Parameters, parameters
from pyrl_ext.plan.plan import Plan

# In the order they come; the metrics of a run have the same names, after `time/`.
PHASES = ("publish", "rollout", "old_logprobs", "ref_logprobs", "update")

ERROR = "never held against a run on GPUs: shares of the data sheets' rates are assumptions"


@dataclass(frozen=True)
class Cost:
    """Time that one kind of work takes in a phase: of a rank, on average over pipeline stages."""

    phase: str
    name: str
    amount: float
    """On one rank."""
    unit: str
    """FLOP, byte, layer (of a token), or % of the passes that stages wait."""
    seconds: float
    why: str
    """What the time is taken from."""


@dataclass(frozen=True)
class StepTime:
    """One rollout step. Phases come one after another."""

    costs: tuple[Cost, ...]
    """Every phase's, adding up to its time."""
    model_flops: float
    """Of the update, forward and backward, without what is computed again; all ranks."""
    peak: float
    """Of all ranks [FLOP/s]."""
    assumed: tuple[str, ...]
    """Sentences: what holds for all costs."""
    error: str = ERROR
    """How far estimates were off where they were held against runs."""

    def seconds(self, phase: str) -> float:
        """Of one phase."""
        return sum(cost.seconds for cost in self.costs if cost.phase == phase)

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def trainer(self) -> float:
        """Of the trainer's own passes."""
        return self.total - self.seconds("publish") - self.seconds("rollout")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the update."""
        return self.model_flops / (self.seconds("update") * self.peak)


def step_time(plan: Plan) -> StepTime | None:
    """Seconds of a step; None where the plan names no GPU."""
    gpu = gpu_of(plan)
    if gpu is None:
        return None
    run = Passes(plan, gpu)
    scored = pass_costs(run, step_rounds(plan), ["score"])
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
    """About what the trainer's passes of a step take, microbatches all alike: to put many plans in
    order before a few are priced. Raises ValueError where the plan names no GPU."""
    gpu = gpu_of(plan)
    if gpu is None:
        raise ValueError("quick_seconds: hardware.gpu is null, expected a GPU")
    run, number = Passes(plan, gpu, quick=True), plan.batching.minibatches
    scored = sum(each.seconds for each in pass_costs(run, even_rounds(plan, 1), ["score"]))
    updates = sum(each.seconds for each in _minibatch(run, even_rounds(plan, number)))
    return scored * (2 if plan.objective.kl_coef else 1) + number * updates


def update_flops(plan: Plan) -> float:
    """Model FLOPs of a step's updates, all ranks: of a forward pass, and twice that of a backward
    one, for the rows and causal pairs of the samples without padding."""
    samples = step_samples(plan)
    rows, scored = sum(s.rows for s in samples), sum(s.response for s in samples)
    pairs = sum(s.rows * (s.rows + 1) / 2 for s in samples)
    return 3 * model_flops(plan.shape, plan.num_mtp_layers).of(rows, pairs, scored)


def _phase(phase: str, spent: Iterable[Spent]) -> Iterator[Cost]:
    return (Cost(phase, *each) for each in spent if each.seconds)


def _together(spent: Iterable[Spent]) -> Iterator[Spent]:
    """Costs of the same name added up; shares are averaged by time."""
    found: dict[str, Spent] = {}
    for each in spent:
        old = found.get(each.name)
        if old is not None:
            amount, seconds = old.amount + each.amount, old.seconds + each.seconds
            if each.unit == "%":
                weighed = old.amount * old.seconds + each.amount * each.seconds
                amount = weighed / seconds if seconds else 0.0
            each = each._replace(amount=amount, seconds=seconds)
        found[each.name] = each
    return iter(found.values())


def _assumed(plan: Plan) -> Iterator[str]:
    samples = step_samples(plan)
    prompt = sum(s.prompt for s in samples) / len(samples)
    response = sum(s.response for s in samples) / len(samples)
    yield (
        f"{len(samples)} samples of {prompt:,.0f} + {response:,.0f} tokens on average (estimate), "
        f"the longest with {max(s.rows for s in samples):,} rows"
    )
    yield "routed experts evenly used; every round as slow as its fullest rank"
    yield "left out: the embedding, the host's work, launches of kernels, evaluation, checkpoints"


# Publish -----------------------------------------------------------------------------------------


def _publish(plan: Plan, gpu: Gpu) -> Iterator[Spent]:
    """Every rank gathers the whole model, tensor by tensor, and its engine takes a part."""
    if plan.rollout.engine == "recorded":
        return
    total, each = parameters(plan.shape).total, DTYPE_BYTES[plan.model.dtype]
    held = min(local_parameters(plan, stage) for stage in stage_parameters(plan))
    node = plan.hardware.per_node
    rate, why = reached("ring", group_rate(gpu, node, plan.world_size, 1), "byte")
    moved = each * (total - held)
    yield Spent("gather weights", moved, "byte", moved / rate, why)
    taken = total * DTYPE_BYTES[plan.rollout_dtype] / plan.rollout.tp
    if plan.rollout.gpus is None:
        rate, why = reached("memory", gpu.bandwidth, "byte")
        yield Spent("load weights", 2 * taken, "byte", 2 * taken / rate, f"read and written; {why}")
    else:
        rate, why = reached("ring", gpu.network, "byte")
        yield Spent("send weights", taken, "byte", taken / rate, f"to the engine's GPUs; {why}")
    if plan.rollout.offload_trainer == "none":
        return
    names = [f"{name} on the host" for name in ("weights", "gradients", "optimizer")]
    away = max(sum(map(stage.bytes_of, names)) for stage in stage_memory(plan))
    rate, why = reached("host", gpu.host, "byte")
    yield Spent("offload trainer", 2 * away, "byte", 2 * away / rate, f"there and back; {why}")


# Update ------------------------------------------------------------------------------------------


def _update(run: Passes) -> Iterator[Spent]:
    for rounds in update_rounds(run.plan):
        yield from _minibatch(run, rounds)


def _minibatch(run: Passes, rounds: tuple[Round, ...]) -> Iterator[Spent]:
    """Forward and backward passes, and an optimizer step."""
    plan, gpu = run.plan, run.gpu
    fullest = max(stage_parameters(plan), key=lambda stage: local_parameters(plan, stage))
    computed = pass_costs(run, rounds, ["forward", "backward"])
    yield from computed
    yield from _activations(plan, gpu, rounds)
    last = sum(each.seconds for each in computed) * 2 / 3 / len(rounds)
    yield from _gradients(plan, gpu, fullest, last)
    yield from _optimizer(plan, gpu, fullest)


def _activations(plan: Plan, gpu: Gpu, rounds: tuple[Round, ...]) -> Iterator[Spent]:
    """What model.offload_layers sends to the host and back."""
    if not plan.model.offload_layers:
        return
    held = sum(stage.bytes_of("offloaded activations") for stage in stage_memory(plan))
    full = plan.batching.tokens_per_microbatch
    share = sum(max(of.rows for of in each.bins) / each.cp / full for each in rounds)
    rate, why = reached("host", gpu.host, "byte")
    moved = 2 * held * share
    yield Spent("offload activations", moved, "byte", moved / rate, f"nothing overlaps; {why}")


def _gradients(plan: Plan, gpu: Gpu, stage: Parameters, last: float) -> Iterator[Spent]:
    """float32 sums over the ranks that hold the same weights, and the weights back from those that
    updated a part; ``last``: seconds of a round's backward pass, which may hide the sums."""
    parallel, node = plan.parallel, plan.hardware.per_node
    span = parallel.ep * parallel.etp_size
    expert = -(-stage.expert // span)
    dense = local_parameters(plan, stage) - expert
    copies = parallel.world_size // parallel.pp
    weight = DTYPE_BYTES[plan.model.dtype]
    summed = gathered = summing = gathering = 0.0
    why = ""
    groups = ((dense, copies // parallel.tp, parallel.tp), (expert, copies // span, span))
    for held, size, apart in groups:
        if size == 1 or not held:
            continue
        rate, why = reached("ring", group_rate(gpu, node, size, apart), "byte")
        share = (size - 1) / size
        sums = 4 * held * share * (1 if plan.optimizer.distributed else 2)
        back = weight * held * share * plan.optimizer.distributed
        summed, gathered = summed + sums, gathered + back
        summing, gathering = summing + sums / rate, gathering + back / rate
    if plan.optimizer.overlap_grad_reduce:
        summing, why = max(0.0, summing - last), f"beyond the last round's backward pass; {why}"
    yield Spent("reduce gradients", summed, "byte", summing, f"float32; {why}")
    yield Spent("gather weights", gathered, "byte", gathering, why)


def _optimizer(plan: Plan, gpu: Gpu, stage: Parameters) -> Iterator[Spent]:
    """AdamW: gradient, weight and two moments are read, the last three written, in float32, and
    the model's weights; before, gradients are set to zero and their norm is taken."""
    parallel, weight = plan.parallel, DTYPE_BYTES[plan.model.dtype]
    span, copies = parallel.ep * parallel.etp_size, parallel.world_size // parallel.pp
    expert = -(-stage.expert // span)
    held = local_parameters(plan, stage)
    mine = held
    if plan.optimizer.distributed:
        mine = (held - expert) * parallel.tp // copies + expert * span // copies
    there = mine * plan.optimizer.offload
    rate, why = reached("memory", gpu.bandwidth, "byte")
    moved = 8 * held + (28 + weight) * (mine - there)
    yield Spent("optimizer", moved, "byte", moved / rate, f"28 + {weight} bytes a parameter; {why}")
    rate, why = reached("host", gpu.host, "byte")
    moved = (28 + 4 + weight) * there
    why = f"the host's memory is as fast as the way to it, nothing overlaps; {why}"
    yield Spent("optimizer on the host", moved, "byte", moved / rate, why)
