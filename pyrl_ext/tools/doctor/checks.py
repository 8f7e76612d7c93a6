"""This host against a plan: processes, packages, memory, ports and the run folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.parameters import trained_of_stage
from pyrl_ext.plan.forecast.units import DTYPE_BYTES, size
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.tools.doctor.facts import Facts, disk_of, nearest
from pyrl_ext.tools.doctor.features import Feature
from pyrl_ext.tools.doctor.ports import ports

SHARED_MEMORY = 2**30  # containers have 64 MiB by default, and NCCL fails there
OPEN_FILES = 512, 8  # assumed: for files, engines and shards; and for each rank that it talks to


@dataclass(frozen=True)
class Check:
    """One comparison of the plan with this host.

    Args:
        name: what is compared.
        problem: what is wrong, and what to do; None: nothing.
        found: what was found.
    """

    name: str
    found: str
    problem: str | None = None


def checks(plan: Plan, facts: Facts, features: tuple[Feature, ...]) -> tuple[Check, ...]:
    """Every check of this host."""
    return tuple(_checks(plan, facts, features))


def _checks(plan: Plan, facts: Facts, features: tuple[Feature, ...]) -> Iterator[Check]:
    for reason in plan.unsupported:
        yield Check("plan", "refused", f"the trainer refuses it: {reason}")
    there = {feature.name: feature for feature in features}
    for name, why in _needed(plan):
        missing = "; ".join(there[name].missing)
        problem = f"{why}, but {missing}. Get it: {there[name].get}" if missing else None
        yield Check(name, missing or "there", problem)
    yield _processes(plan, facts)
    yield from _memory(plan, facts)
    if plan.device == "cuda" and plan.world_size > 1:
        found = (facts["shared_memory"] or {"total": 0})["total"]
        short = found < SHARED_MEMORY
        problem = (
            f"{size(found)}, expected {size(SHARED_MEMORY)}; NCCL's ranks of a host share it. "
        )
        problem += "Start the container with --shm-size=16g or --ipc=host"
        yield Check("shared memory (/dev/shm)", size(found), problem if short else None)
    yield _open_files(plan, facts)
    yield _run_folder(plan)
    yield _disk(plan)
    yield from (Check(*each) for each in ports(plan))


def _needed(plan: Plan) -> Iterator[tuple[str, str]]:
    """(feature, what asks for it)."""
    on_gpu = plan.device == "cuda"
    yield "training on GPUs" if on_gpu else "training", f"device is {plan.device}"
    if plan.rollout.engine == "vllm" and not plan.engines_apart:
        name = "rollouts with vLLM on GPUs" if on_gpu else "rollouts with vLLM on a CPU"
        yield name, "rollout.engine is vllm"
    if plan.model.backend == "te":
        yield "model.backend: te", "model.backend is te"
    if plan.log.wandb:
        yield "log.wandb", f"log.wandb is {plan.log.wandb}"
    if plan.model.fp8:
        yield "model.fp8", f"model.fp8 is {plan.model.fp8}"
    if on_gpu and plan.world_size > plan.hardware.gpus_per_node:
        yield "several hosts", f"the plan has {plan.world_size} ranks"


def launched_ranks() -> int | None:
    """Ranks that torchrun started; None: it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def ranks_here(plan: Plan) -> int:
    """Ranks that this host runs: as torchrun says, or as the plan's nodes hold."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return (
        min(plan.world_size, plan.hardware.gpus_per_node)
        if plan.device == "cuda"
        else plan.world_size
    )


def _processes(plan: Plan, facts: Facts) -> Check:
    name, here = "processes", ranks_here(plan)
    started = launched_ranks()
    if started not in (None, plan.world_size):
        how = "Start as many, or change parallel"
        return Check(name, f"{started}", f"{started}, expected the plan's {plan.world_size}. {how}")
    seen = facts["torch"].get("gpus", 0)
    if plan.device == "cuda" and seen < here:
        problem = f"{here} ranks on a host, but torch sees {seen} GPUs. Change parallel.dp"
        return Check(name, f"{seen} GPUs", problem)
    return Check(name, f"{plan.world_size} ranks, {here} on this host")


def _memory(plan: Plan, facts: Facts) -> Iterator[Check]:
    """The fullest stage in a device, and all ranks of this host in its memory."""
    stages, here = stage_memory(plan), ranks_here(plan)
    peak = max(stage.peak for stage in stages)
    on_host = max(max(stage.held(phase, host=True) for phase in stage.phases) for stage in stages)
    fits = f"See python -m pyrl_ext.plan {plan.source} for what holds it"
    if plan.device == "cuda" and facts["gpus"]:
        smallest = min(gpu["memory"] for gpu in facts["gpus"])
        problem = f"a rank needs {size(peak)}, but a GPU has {size(smallest)}. {fits}"
        yield Check("memory of a GPU", size(smallest), problem if peak > smallest else None)
    if plan.device == "cpu":
        on_host += peak
    needed, has = here * on_host, facts["memory"]
    problem = f"{here} ranks need {size(needed)}, but this host has {size(has)}. {fits}"
    yield Check("memory of this host", size(has), problem if needed > has else None)


def _open_files(plan: Plan, facts: Facts) -> Check:
    soft, hard = facts["open_files"]
    base, each = OPEN_FILES
    needed = base + each * plan.world_size
    problem = f"{soft}, expected {needed}; ranks hold sockets to each other. ulimit -n {hard}"
    return Check("open files", f"{soft}", problem if 0 <= soft < needed else None)


def _run_folder(plan: Plan) -> Check:
    """Whether the run can write where the plan says."""
    name, folder = "run folder", nearest(Path(plan.run))
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"{folder}: {error.strerror}, expected a folder that can be written. Change run"
        return Check(name, plan.run, problem)
    return Check(name, plan.run)


def checkpoint_bytes(plan: Plan) -> int:
    """About what one checkpoint takes: weights, and the optimizer's float32 numbers beside them.

    Adapters are saved alone. Towers are left out.
    """
    trained = sum(trained_of_stage(plan, stage).total for stage in range(len(plan.stages)))
    weight = DTYPE_BYTES[plan.model.dtype]
    hf = weight * parameters(plan.sizes).total if plan.checkpoint.hf else 0
    return trained * (weight + 12) + hf  # the optimizer's weights and two moments


def _disk(plan: Plan) -> Check:
    """Whether the checkpoints that are kept have room, and the one that is written beside them."""
    name, folder, one = "disk", nearest(Path(plan.run)), checkpoint_bytes(plan)
    every = plan.checkpoint.every or plan.steps
    held = len([*(Path(plan.run) / "checkpoints").glob("step-*")])  # of a run that is resumed
    number = max(1, min(plan.checkpoint.keep + 1, -(-plan.steps // every)) - held)
    found = disk_of(folder)
    if found is None:
        return Check(name, "cannot be read")
    free, needed = found["free"], number * one
    problem = (
        f"{size(free)} free for run {plan.run}, expected about {size(needed)}: {number} "
        f"checkpoints of {size(one)}. Lower checkpoint.keep, or change run"
    )
    return Check(name, f"{size(free)} free", problem if free < needed else None)
