"""A step of a model with GLM-4.7-Flash's true widths: ``python -m benchmarks.gpu.step --layers 4``.

Random weights are drawn on the GPU; the samples are random tokens and routes. Rows: the
log-prob pass and the update, each in seconds and bytes beside the plan's; kernels launched; the
kernels that took longest; the places of the update that waited for the device.

One layer is a MoE layer; of four the first is dense, as in the whole model.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.rows import ABSENT, MISSED, OK, note, noting
from benchmarks.lengths import lognormal
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.compute_time import Passes, pass_costs
from pyrl_ext.plan.forecast.memory import Load, StageMemory, stage_memory
from pyrl_ext.plan.forecast.rounds import Bin, Round
from pyrl_ext.plan.forecast.step_time import minibatch_costs
from pyrl_ext.plan.language.errors import ConfigError
from pyrl_ext.plan.model.hardware import GPUS, gpu_of
from pyrl_ext.schedule import Schedule
from pyrl_ext.trainer.policy import Policy
from tests.helpers.passes import WholeBatch, shard_of, weighed

CONFIGS = Path(__file__).parents[2] / "configs"
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and what begins so
RANGES = ("pyrl: ", "Optimizer.")  # spans of several kernels, which the profiler shows next to them
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "vocab_size")
NAMED = ("trainer/policy.py:_sums",)  # says that it reads the sums of a pass
CONTEXT = "CUDA and NCCL"  # torch's allocator does not give it out


@dataclass(frozen=True)
class Shape:
    """Sizes of a step.

    Args:
        layers: of the model; a single one has routed experts.
        microbatch: most rows of a microbatch.
        microbatches: how many.
        shrink: what widths are divided by, for a look at the program without a GPU.
    overrides: of the config, ``key=value``.
    """

    layers: int
    microbatch: int = 16384
    microbatches: int = 2
    shrink: int = 1
    device: str = "cuda"
    overrides: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.microbatch // 4

    def config(self) -> dict[str, Any]:
        """GLM-4.7-Flash's config with so many layers."""
        hf = json.loads((CONFIGS / "glm47" / "config.json").read_text())
        narrow = {name: hf[name] // self.shrink for name in WIDTHS}
        if self.shrink > 1:
            narrow |= {"n_routed_experts": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
        dense = int(self.layers > 1)
        return hf | narrow | {"num_hidden_layers": self.layers, "first_k_dense_replace": dense}


def plan_of(shape: Shape, backend: str = "local", gpu: str = "H100") -> Plan:
    """The plan of a step on one GPU; a `ConfigError` where it does not hold."""
    dtype = "bfloat16" if shape.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(shape.config()))
        overrides = [
            f"model.config={path}",
            "model.weights=null",
            "model.tokenizer=tiny",
            f"model.backend={backend}",
            f"model.dtype={dtype}",
            "model.recompute=none",
            "parallel.dp=1",
            "parallel.ep=1",
            "optimizer.distributed=false",
            f"device={shape.device}",
            f"hardware.gpu={gpu}",
            f"batching.tokens_per_microbatch={shape.microbatch}",
            "batching.minibatches=1",
            "rollout.tp=1",
            "data.max_prompt_tokens=32",
            f"rollout.max_new_tokens={shape.longest - 32}",
            f"run={folder}/run",
            *["rollout.offload_trainer=all"] * (shape.device == "cuda"),
            *shape.overrides,
        ]
        return compile_plan(CONFIGS / "glm47.yaml", overrides)


def short(kernel: str) -> str:
    """The name of a kernel without namespaces and what every one begins with."""
    name = re.sub(r"^void |\(anonymous namespace\)::|\b(?:at|native|pyrl|base|std)::", "", kernel)
    return name[:90]


def gpu_name(device: str) -> str:
    """The data sheet of this GPU, or of an H100."""
    there = device == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if there else ""
    return next((known for known in GPUS if known in name.upper()), "H100")


def batch_of(plan: Plan, rows: int) -> WholeBatch:
    """Random tokens and routes of samples that sum to about ``rows``."""
    g = torch.Generator().manual_seed(0)
    sizes = plan.sizes
    lengths = lognormal(4 * rows // plan.longest, plan.longest, rows * 31 // 32)
    count = sum(lengths)
    first = torch.randint(sizes.num_experts, (count, len(plan.router_layers), 1), generator=g)
    routes = (first + torch.arange(sizes.topk)) % sizes.num_experts
    return WholeBatch(
        seqlens=lengths,
        tokens=torch.randint(3, sizes.vocab_size, (count,), generator=g),
        targets=torch.randint(3, sizes.vocab_size, (count,), generator=g),
        loss_mask=torch.rand(count, generator=g) > 0.125,
        rollout_logprobs=torch.full((count,), -11.0),
        advantages=torch.randn(count, generator=g),
        routes=routes.to(torch.uint8),
        layer_ids=tuple(plan.router_layers),
        route_mask=torch.ones(count, dtype=torch.bool),
    )


def rounds_of(batch: WholeBatch, schedule: Schedule) -> list[Round]:
    """The microbatches as the forecast counts them."""
    starts = batch.starts
    rounds = list[Round]()
    for groups in schedule.microbatches:
        ids = [i for group in groups for i in group.samples]
        lengths = [batch.seqlens[i] for i in ids]
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        scored = sum(int(batch.loss_mask[starts[i] : starts[i + 1]].sum()) for i in ids)
        rounds.append(Round(1, (Bin(sum(lengths), pairs, scored),)))
    return rounds


def estimates(plan: Plan, rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Phase -> part -> the plan's seconds."""
    gpu = gpu_of(plan)
    assert gpu is not None
    run = Passes(plan, gpu)
    found: dict[str, dict[str, float]] = {"logprobs": {}, "update": {}}
    for phase, costs in (
        ("logprobs", pass_costs(run, rounds, ["score"])),
        ("update", minibatch_costs(run, tuple(rounds))),
    ):
        for cost in costs:
            found[phase][cost.name] = found[phase].get(cost.name, 0.0) + cost.seconds
    return found


def draw_weights(policy: Policy) -> None:
    """Normal weights, made on the device; the optimizer's copies follow."""
    module = policy.llm
    with torch.no_grad():
        for name, value in module.named_parameters().items():
            if "norm" in name:
                value.fill_(1)
            elif value.is_floating_point():
                value.zero_() if name.endswith("bias") else value.normal_(std=0.02)
    module.optimizer.reload_model_params()


class Bench:
    """A model and the shard that it is measured on."""

    def __init__(self, plan: Plan, topo: Topology, rows: int):
        self.plan = plan
        self.topo = topo
        self.loss = build_loss(plan.objective)
        self.policy = Policy.build(plan, topo, initial=False)
        draw_weights(self.policy)
        self.batch = batch_of(plan, rows)
        self.schedule = Scheduler(plan).schedule(self.batch.seqlens)
        self.shard: BatchShard = weighed(self.policy, self.batch, self.schedule)
        self.plain = shard_of(self.policy, self.batch, self.schedule)
        self.on_gpu = topo.device.type == "cuda"

    def score(self) -> None:
        self.policy.scores(self.plain)

    def update(self) -> None:
        self.policy.update(self.shard, self.loss)

    @property
    def memory(self) -> StageMemory:
        """The plan's bytes for the rows that are computed."""
        most = max(each.bins[0].rows for each in rounds_of(self.batch, self.schedule))
        rows = sum(self.batch.seqlens)
        (found,) = stage_memory(self.plan, Load(most, rows, max(self.batch.seqlens)))
        return found

    def phase(self, name: str, run: Callable[[], None]) -> None:
        """Seconds and bytes of a phase that has run before, next to the plan's."""
        clock = Clock(torch.cuda.synchronize if self.on_gpu else None)
        peak = 0
        for turn in ("first", "second"):
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            with clock(turn):
                run()
            peak = torch.cuda.max_memory_allocated() if self.on_gpu else 0
        rounds = rounds_of(self.batch, self.schedule)
        parts = estimates(self.plan, rounds)[name]
        found = min(clock.take().values())
        memory = self.memory
        planned = memory.held(name) - memory.bytes_of(CONTEXT)
        note(
            f"{name}: seconds and bytes",
            OK,
            "",
            ms=1e3 * found,
            planned_ms=1e3 * sum(parts.values()),
            times_planned=found / sum(parts.values()),
            rows=sum(self.batch.seqlens),
            microbatches=len(self.schedule),
            peak_GiB=peak / 2**30,
            planned_GiB=planned / 2**30,
        )
        shown = {part: round(1e3 * seconds, 2) for part, seconds in parts.items() if seconds}
        note(f"{name}: the plan's parts [ms]", OK, "", **shown)

    def launches(self, name: str, run: Callable[[], None]) -> None:
        """Kernels launched, the device's time, and the kernels that take most of it."""
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.on_gpu]
        with profile(activities=activities) as trace:
            run()
            if self.on_gpu:
                torch.cuda.synchronize()
        calls: Counter[str] = Counter()
        kernels: Counter[str] = Counter()
        for event in trace.key_averages():
            if event.key.startswith(LAUNCHES):
                calls["launches"] += event.count
            elif event.key.startswith(("cudaMemcpy", "cudaMemset")):
                calls["copies"] += event.count
            elif "Synchronize" in event.key:
                calls["synchronizations"] += event.count
            if event.device_type == DeviceType.CUDA and not event.key.startswith(RANGES):
                kernels[event.key] += event.self_device_time_total
        layers = self.plan.sizes.num_hidden_layers * len(self.schedule)
        busy = sum(kernels.values()) / 1e3
        note(
            f"{name}: launches",
            OK,
            "",
            **calls,
            per_layer_and_microbatch=round(calls["launches"] / layers, 1),
            device_ms=busy,
        )
        for kernel, taken in kernels.most_common(12):
            note(f"{name}: kernel {short(kernel)}", ms=taken / 1e3, share=taken / 1e3 / busy)

    def waits(self) -> None:
        """The places of a pass and of the optimizer's step that wait for the device."""
        passes = waits_of(lambda: self.policy.accumulate(self.shard, self.loss))
        more = [place for place in passes if place not in NAMED]
        why = f"waits at {', '.join(more)}, expected at {', '.join(NAMED)} alone" if more else ""
        name = "passes of the microbatches: waits for the device"
        note(name, MISSED if more else OK, why, **passes)
        steps = waits_of(self.policy.step_optimizer)
        note("optimizer step: waits for the device", OK, "", **steps)


def waits_of(run: Callable[[], object]) -> Counter[str]:
    """Function in file -> how often it waits for the device, as torch's debug mode sees it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(each.filename).parent.name}/{Path(each.filename).name}:"
        f"{function_at(Path(each.filename), each.lineno)}"
        for each in caught
        if "synchroniz" in str(each.message) and "prototype" not in str(each.message)
    )


def function_at(file: Path, line: int) -> str:
    """The name of the innermost function around a line of a file."""
    found = "?"
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            found = node.name  # inner ones come later
    return found


def checked(shape: Shape, backend: str, name: str) -> Plan | None:
    """The plan; None, and a row with the reason, where it is refused."""
    try:
        plan = plan_of(shape, backend, gpu_name(shape.device))
    except ConfigError as error:
        note(name, ABSENT, str(error)[:300])
        return None
    if plan.unsupported:
        note(name, ABSENT, "; ".join(plan.unsupported))
        return None
    return plan


def priced(plan: Plan, name: str) -> None:
    """The plan's seconds and bytes of a full microbatch."""
    rows = plan.batching.tokens_per_microbatch
    most = plan.longest
    pairs = rows // most * (most * (most + 1) // 2)
    found = estimates(plan, [Round(1, (Bin(rows, pairs, rows),))])
    (memory,) = stage_memory(plan)
    for phase, parts in found.items():
        ms = 1e3 * sum(parts.values())
        note(f"{name}: {phase}", planned_ms=ms, planned_GiB=memory.held(phase) / 2**30)


def step(shape: Shape, backend: str, name: str) -> None:
    plan = checked(shape, backend, name)
    if plan is None:
        return
    with topology.start(plan) as topo:
        bench = Bench(plan, topo, shape.microbatch * shape.microbatches)
        bench.score()
        bench.update()  # the optimizer's state is made
        runs = {"logprobs": bench.score, "update": bench.update}
        for phase, run in runs.items():
            with noting(f"{phase}: seconds and bytes"):
                bench.phase(phase, run)
        for phase, run in runs.items():
            with noting(f"{phase}: launches"):
                bench.launches(phase, run)
        if bench.on_gpu:
            with noting("update: waits for the device"):
                bench.waits()
    note(name, OK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    parser.add_argument("--backend", choices=["local", "te"], nargs="+", default=["local"])
    parser.add_argument("--rows", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--plan", action="store_true", help="the plans alone: no GPU, no model")
    parser.add_argument("--small", action="store_true", help="narrow, on this processor")
    parser.add_argument("overrides", nargs="*", help="of the config: key=value")
    given = parser.parse_args()
    for backend, layers in product(given.backend, given.layers):
        name = f"{backend}, {layers} layer{'s' * (layers > 1)}"
        shape = Shape(layers, given.rows, overrides=tuple(given.overrides))
        if given.small:
            shape = Shape(layers, 256, 2, shrink=16, device="cpu")
        with noting(name):
            if not given.plan:
                step(shape, backend, name)
            elif plan := checked(shape, backend, name):
                priced(plan, name)


if __name__ == "__main__":
    main()
