"""Estimated time of a step, by phase and by kind of work, with the assumption behind each number.

Samples have the lengths of `workload.step_samples`. Work is counted exactly; the share of a data
sheet's rate that kernels and links reach is assumed (`compute_time.REACHED`). Routed experts are
assumed to be evenly used. The embedding, kernel launches and all host work but that of a weight
sync are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from pyrl_ext.plan.forecast.compute_time import Passes, Spent, added, pass_costs, reached
from pyrl_ext.plan.forecast.encoder import EncoderForecast, encoder_parameters, encoders
from pyrl_ext.plan.forecast.flops import update_flops
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.muon import ITERATIONS, MORE_BYTES, muon_flops, muon_parameters
from pyrl_ext.plan.forecast.parameters import (
    copies,
    loaded_tensors,
    optimizer_parameters,
    published,
    quantized_matrices,
    rank_parameters,
    stage_parameters,
    trained_of_stage,
)
from pyrl_ext.plan.forecast.rollout_time import rollout_costs
from pyrl_ext.plan.forecast.rounds import Round, step_rounds, update_rounds
from pyrl_ext.plan.forecast.workload import step_samples
from pyrl_ext.plan.model.counts import Parameters, parameters
from pyrl_ext.plan.model.hardware import BROADCAST, TCP, Gpu, gpu_of, group_rate
from pyrl_ext.plan.phases import OFFLOADED
from pyrl_ext.plan.plan import Plan

# of Python in a weight sync [s], for a tensor that is sent and for one that vLLM loads:
# `benchmarks.publish --host` on a Xeon with AMX, as hosts of H100 and H200 have
TENSOR_SECONDS = 20e-6
LOAD_SECONDS = 400e-6
# of Python for vLLM to quantize a matrix of 128 x 128 on a CPU, with its arithmetic [s]
CAST_SECONDS = 80e-6
STEPPING = ("optimizer", "orthogonal updates", "gather weights")
"""Costs of an update that need the optimizer's state, or follow its step."""


@dataclass(frozen=True)
class StepTime:
    """Time of one rollout step; its phases do not overlap."""

    costs: tuple[Spent, ...]
    """Costs of every phase; they add up to its time."""
    model_flops: float
    """FLOPs of the update on all ranks, forward and backward, without recomputation."""
    peak: float
    """Peak rate of all ranks [FLOP/s]."""
    assumed: tuple[str, ...]
    """Assumptions behind all costs, in sentences."""
    error: ClassVar[str] = (
        "never compared with a run on GPUs: the shares of the data sheets' rates are assumptions"
    )
    """Errors of estimates that were compared with runs."""

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
    updates = [[*minibatch_costs(run, rounds)] for rounds in update_rounds(plan)]
    epoch = [cost for each in updates for cost in each]
    before_update = (
        *_phase("publish", _publish(plan, gpu)),
        *_phase("rollout", rollout_costs(plan, gpu)),
        *_phase("old_logprobs", () if plan.scores_in_update else scored),
        *_phase("ref_logprobs", scored if plan.objective.kl_coef else ()),
        *_phase("teacher_logprobs", _teachers(plan, gpu)),
    )
    passes = [cost for cost in before_update if cost.phase.endswith("logprobs")]
    passes += [cost for cost in updates[0] if cost.name not in STEPPING]
    late = _late(plan, gpu, sum(cost.seconds for cost in passes))
    costs = (
        *before_update,
        *_phase("update", [*late, *added(epoch * plan.batching.epochs)]),
    )
    peak = plan.world_size * gpu.flops["fp8" if plan.model.fp8 else plan.model.dtype]
    return StepTime(costs, update_flops(plan), peak, tuple(_assumed(plan)))


def _teachers(plan: Plan, gpu: Gpu) -> Iterable[Spent]:
    """The passes of the teachers, each over all samples."""
    for teacher in plan.teacher_plans.values():
        yield from pass_costs(Passes(teacher, gpu), step_rounds(plan), ["score"])


def _phase(phase: str, costs: Iterable[Spent]) -> Iterator[Spent]:
    return (cost._replace(phase=phase) for cost in costs if cost.seconds)


def _assumed(plan: Plan) -> Iterator[str]:
    samples = step_samples(plan)
    prompt = sum(s.prompt for s in samples) / len(samples)
    response = sum(s.response for s in samples) / len(samples)
    yield (
        f"{len(samples)} samples of {prompt:,.0f} + {response:,.0f} tokens on average (estimate), "
        f"the longest with {max(s.rows for s in samples):,} rows"
    )
    yield "routed experts are evenly used; every microbatch is as slow as its slowest rank"
    if plan.scores_in_update:
        yield "old log-probs are those of the update's forward pass, which is the only one"
    for encoder in encoders(plan):
        yield (
            f"{encoder.name}: {plan.estimate.images:g} images of {plan.estimate.image_patches:,} "
            "patches in a sample (estimate)"
        )
    servers = ", servers of the teacher" if plan.teacher.servers else ""
    yield f"left out: the embedding, other host work, launches, evaluation, checkpoints{servers}"


# Weight sync -------------------------------------------------------------------------------------


def _publish(plan: Plan, gpu: Gpu) -> Iterator[Spent]:
    """Every rank gathers the model, bucket by bucket, and its engine reads a part of it; senders
    share it out to remote engines. With adapters only what they change is sent, after the first
    sync."""
    if plan.rollout.engine not in ("hf", "vllm"):
        return
    sent = published(plan)
    total = sent.numbers + encoder_parameters(plan)
    width = plan.weight_bytes
    held = min(rank_parameters(plan, stage).total for stage in stage_parameters(plan))
    held *= sent.numbers / parameters(plan.sizes).total  # of what is sent as of the rest
    peak = group_rate(gpu, plan.hardware.gpus_per_node, plan.world_size, 1)
    missing = max(0.0, total / plan.rollout.senders - held)
    gathered = Spent.at("gather weights", width * missing, "ring", peak)
    yield gathered
    why = f"{1e6 * TENSOR_SECONDS:g} us of Python to gather and pass on each"
    yield Spent("tensors", sent.tensors, "tensor", TENSOR_SECONDS * sent.tensors, why)
    if plan.rollout.engine == "vllm":
        loaded = loaded_tensors(plan)
        why = f"{1e6 * LOAD_SECONDS:g} us of Python in vLLM's loader, experts of a kind together"
        yield Spent("load tensors", loaded, "tensor", LOAD_SECONDS * loaded, why)
    if plan.rollout.quantization is not None:
        casts = quantized_matrices(plan)
        why = f"at most {1e6 * CAST_SECONDS:g} us for vLLM to quantize each, on a CPU"
        yield Spent("quantize", casts, "tensor", CAST_SECONDS * casts, why)
    taken = total * plan.engine_bytes / plan.rollout.tp
    if plan.remote_engines:
        yield _sent_to_servers(plan, gpu, width * total, gathered.seconds)
        yield Spent.at("load weights", taken, "host", gpu.host, "from the engine's host")
    elif plan.rollout.gpus is None:
        yield Spent.at("load weights", 2 * taken, "memory", gpu.bandwidth, "read and written")
    else:
        yield Spent.at("send weights", taken, "ring", gpu.network, "to the engine's GPUs")
    if OFFLOADED[plan.rollout.offload_trainer]:
        moved = max(2 * sum(held.values()) - held["optimizer"] for held in _offloaded(plan))
        note = "to the host and back; the optimizer's state comes back behind the passes"
        yield Spent.at("offload trainer", moved, "host", gpu.host, note)


def _offloaded(plan: Plan) -> Iterator[Counter[str]]:
    """Bytes that a rank of each stage moves to the host: of the optimizer, and of others."""
    for stage in stage_memory(plan):
        held = Counter[str]()
        for item in stage.items:
            if item.name.endswith(" on the host"):
                name = "optimizer" if item.name.startswith("optimizer") else "others"
                held[name] += item.bytes
        yield held


def _late(plan: Plan, gpu: Gpu, before: float) -> Iterator[Spent]:
    """The optimizer's state that is still on the host after `before` seconds of passes."""
    if OFFLOADED[plan.rollout.offload_trainer]:
        held = max(each["optimizer"] for each in _offloaded(plan))
        left = max(0, held - before * reached("host", gpu.host))
        note = "not back from the host after the passes before the first step"
        yield Spent.at("state of the optimizer", left, "host", gpu.host, note)


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
    trained = [trained_of_stage(plan, stage) for stage in range(plan.parallel.pp)]
    towers = [each for each in encoders(plan) if each.shared and each.module.train]
    held = [rank_parameters(plan, stored).total for stored in trained]
    held[0] += sum(encoder.on_rank(0) for encoder in towers)
    largest = held.index(max(held))
    if largest > 0:
        towers = []
    computed = pass_costs(run, rounds, ["forward", "backward"])
    yield from computed
    yield from _image_rows(plan, gpu, plan.batching.minibatches, back=True)
    last = sum(spent.seconds for spent in computed) * 2 / 3 / len(rounds)
    yield from _gradients(plan, gpu, trained[largest], towers, last)
    # AdamW reads gradient, weight and two moments and writes the last three, in float32, and writes
    # the model's weights. Before, gradients are set to zero and their norm is computed. Moments in
    # bfloat16 are read and written as such too, by copies from and to float32
    weight = plan.weight_bytes
    adam = 28 if plan.optimizer.moments == "float32" else 52
    stepped = optimizer_parameters(plan, trained[largest])
    stepped += sum(each.stepped(0) for each in towers)
    moved = 8 * held[largest] + (adam + weight) * stepped
    note = f"{adam} + {weight} bytes a parameter"
    if by_muon := muon_parameters(plan, largest):
        moved += MORE_BYTES * by_muon
        note += f", {MORE_BYTES} more of those that Muon steps"
    yield Spent.at("optimizer", moved, "memory", gpu.bandwidth, note)
    operations = muon_flops(plan, largest)
    peak = gpu.flops[plan.model.dtype]
    note = f"{ITERATIONS} iterations a matrix"
    yield Spent.at("orthogonal updates", operations, "projections", peak, note)


def _image_rows(plan: Plan, gpu: Gpu, parts: int, back: bool = False) -> Iterator[Spent]:
    """Rows of images from the encoders' replicas to the shards that embed them: one of `parts` of a
    step's, and with `back` their gradients, if the encoder is trained."""
    for encoder in encoders(plan):
        readers = plan.parallel.dp * plan.parallel.cp * plan.parallel.tp
        rows = encoder.step_patches / encoder.tower.merge**2 / encoder.parallel.dp / parts
        away = 1 - 1 / readers if encoder.shared else 1  # the rest stays on its rank
        ways = 2 if back and encoder.module.train else 1
        moved = rows * encoder.row_width * plan.weight_bytes * ways * away
        peak = group_rate(gpu, plan.hardware.gpus_per_node, plan.world_size, 1)
        yield Spent.at("rows of images", moved, "ring", peak, "from a replica")


def _gradients(
    plan: Plan, gpu: Gpu, trained: Parameters, towers: list[EncoderForecast], last: float
) -> Iterator[Spent]:
    """Float32 gradients are summed over the ranks that hold the same weights, and with a
    distributed optimizer the updated weights are gathered.

    `last`: seconds of the last backward pass, which can hide the sums.
    """
    parallel = plan.parallel
    held = rank_parameters(plan, trained)
    dense_copies, expert_copies = copies(plan)
    distributed = plan.optimizer.distributed
    overlaps = plan.optimizer.overlap_grad_reduce
    note = "float32; beyond the last backward pass" if overlaps else "float32"
    costs: list[Spent] = []
    # parameters, ranks that hold them, and the distance between these ranks
    for count, size, stride in (
        (held.dense, dense_copies, parallel.tp),
        (held.expert, expert_copies, parallel.ep * parallel.etp_size),
        *((encoder.on_rank(0), encoder.parallel.dp, 1) for encoder in towers),
    ):
        if size == 1 or not count:
            continue
        peak = group_rate(gpu, plan.hardware.gpus_per_node, size, stride)
        away = count * (size - 1) / size
        sums = 4 * away * (1 if distributed else 2)
        back = plan.weight_bytes * away * distributed
        costs.append(Spent.at("reduce gradients", sums, "ring", peak, note))
        costs.append(Spent.at("gather weights", back, "ring", peak))
    for cost in added(costs):
        hidden = last if overlaps and cost.name == "reduce gradients" else 0.0
        yield cost._replace(seconds=max(0.0, cost.seconds - hidden))
