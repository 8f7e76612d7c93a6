"""This machine against a plan: packages, memory, keys, ports and the run folder."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pyrl_ext.parallel.ports import absence_at, process_on
from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.parameters import trained_of_stage
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.units import size
from pyrl_ext.tools.doctor import Facts, Feature, disk_of

SHARED_MEMORY = 2**30  # containers have 64 MiB by default, and NCCL fails there
FILES = 512  # assumed open files of a process, engines and shards included
FILES_OF_RANK = 8  # assumed for each rank that it is connected to
RENDEZVOUS = 29500  # torchrun's default port


@dataclass(frozen=True)
class Check:
    """One comparison of the plan with this machine; ``problem`` says what to do."""

    name: str
    result: str
    problem: str | None = None


def check_plan(plan: Plan, facts: Facts, features: Sequence[Feature]) -> list[Check]:
    """Every check of this machine."""
    checks = [Check("plan", "refused", f"the trainer refuses it: {x}") for x in plan.unsupported]
    by_name = {feature.name: feature for feature in features}
    for name, reason in _needed(plan):
        missing = "; ".join(by_name[name].missing)
        problem = f"{reason}, but {missing}. To get it: {by_name[name].install}"
        checks.append(Check(name, missing or "available", problem if missing else None))
    checks += _room(plan, facts)
    checks += _run_folder(plan)
    checks += _keys(plan, facts)
    if plan.world_size > 1 and "RANK" not in os.environ:
        checks.append(_rendezvous())
    checks += _engines(plan, facts)
    return checks


def _needed(plan: Plan) -> Iterator[tuple[str, str]]:
    """(feature, the key that needs it)."""
    on_gpu = plan.device == "cuda"
    yield "training on GPUs" if on_gpu else "training", f"device is {plan.device}"
    if plan.rollout.engine == "vllm" and not plan.remote_engines:
        name = "rollouts with vLLM on GPUs" if on_gpu else "rollouts with vLLM on a CPU"
        yield name, "rollout.engine is vllm"
    if plan.model.backend == "te":
        yield "model.backend: te", "model.backend is te"
    if plan.log.wandb:
        yield "log.wandb", f"log.wandb is {plan.log.wandb}"
    if plan.model.fp8:
        yield "model.fp8", f"model.fp8 is {plan.model.fp8}"


def _room(plan: Plan, facts: Facts) -> Iterator[Check]:
    """Devices for the ranks of this machine, memory for the fullest stage in a GPU and for all
    ranks in the host, and open files for their sockets."""
    on_gpu = plan.device == "cuda"
    ranks = min(plan.world_size, plan.hardware.gpus_per_node) if on_gpu else plan.world_size
    gpus = facts["torch"].get("gpus", 0)
    problem = f"{ranks} ranks on this machine, but torch sees {gpus} GPUs. Change parallel.dp"
    lacks_gpus = on_gpu and gpus < ranks
    result = f"{plan.world_size} ranks, {ranks} on this machine"
    yield Check("ranks", result, problem if lacks_gpus else None)
    stages = stage_memory(plan)
    peak = max(stage.peak for stage in stages)
    host = max(stage.held(phase, host=True) for stage in stages for phase in stage.phases)
    advice = f"`pyrl plan {plan.source}` lists what takes it"
    if on_gpu and facts["gpus"]:
        smallest = min(gpu["memory"] for gpu in facts["gpus"])
        problem = f"a rank needs {size(peak)}, but a GPU has {size(smallest)}. {advice}"
        yield Check("memory of a GPU", size(smallest), problem if peak > smallest else None)
    needed = ranks * (host if on_gpu else host + peak)
    memory = facts["memory"]
    problem = f"{ranks} ranks need {size(needed)}, but this machine has {size(memory)}. {advice}"
    yield Check("memory of this machine", size(memory), problem if needed > memory else None)
    if on_gpu and plan.world_size > 1:
        shared = (facts["shared_memory"] or {"total": 0})["total"]
        problem = f"{size(shared)}, expected {size(SHARED_MEMORY)} for NCCL. "
        problem += "Start the container with --shm-size=16g or --ipc=host"
        yield Check(
            "shared memory (/dev/shm)", size(shared), problem if shared < SHARED_MEMORY else None
        )
    soft, hard = facts["open_files"]
    needed = FILES + FILES_OF_RANK * plan.world_size
    problem = f"{soft}, expected {needed}; ranks keep sockets to each other. ulimit -n {hard}"
    yield Check("open files", f"{soft}", problem if 0 <= soft < needed else None)


def _run_folder(plan: Plan) -> Iterator[Check]:
    """True if the run can write its folder, and has room for the checkpoints that are kept."""
    run = Path(plan.run).absolute()
    folder = next(path for path in (run, *run.parents) if path.exists())
    problem = None
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"{folder}: {error.strerror}, expected a folder that can be written. Change run"
    yield Check("run folder", plan.run, problem)
    disk = disk_of(folder)
    if disk is None:
        yield Check("disk", "cannot be read")
        return
    one = checkpoint_bytes(plan)
    kept = len(list((run / "checkpoints").glob("step-*")))  # of a run that is resumed
    saves = -(-plan.steps // (plan.checkpoint.every or plan.steps))
    number = max(1, min(plan.checkpoint.keep + 1, saves) - kept)
    problem = (
        f"{size(disk['free'])} free for run {plan.run}, expected about {size(number * one)}: "
        f"{number} checkpoints of {size(one)}. Lower checkpoint.keep, or change run"
    )
    enough = disk["free"] >= number * one
    yield Check("disk", f"{size(disk['free'])} free", None if enough else problem)


def checkpoint_bytes(plan: Plan) -> int:
    """About the bytes of one checkpoint: weights, those of a reference that is refreshed, and the
    optimizer's float32 state of what is trained, no encoders.

    Adapters are saved alone, frozen weights with the others.
    """
    trained = sum(trained_of_stage(plan, stage).total for stage in range(len(plan.stages)))
    weight = plan.weight_bytes
    every = parameters(plan.sizes).total
    saved = max(trained, every if plan.lora is None else 0)
    copies = bool(plan.checkpoint.hf) + bool(plan.objective.reference_refresh)
    return trained * 12 + weight * (saved + copies * every)  # 12: its weights and two moments


def _engines(plan: Plan, facts: Facts) -> Iterator[Check]:
    """Files of TLS, and who answers at the addresses of engines."""
    tls = None
    if plan.rollout.tls is not None:
        if "error" in facts["torch"]:
            return
        from pyrl_ext.rollout.remote.tls import certificate_of, trust_of  # imports torch

        try:
            certificate_of(plan)
            tls = trust_of(plan)
        except ValueError as error:
            yield Check("rollout.tls", "not read", str(error))
            return
        yield Check("rollout.tls", plan.rollout.tls.cert)
    for address in plan.addresses:
        yield _engine(address, plan.source, tls)


def _keys(plan: Plan, facts: Facts) -> Iterator[Check]:
    """Keys of remote engines and of Weights & Biases."""
    if plan.addresses and "error" not in facts["torch"]:
        from pyrl_ext.rollout.remote.auth import server_keys  # imports torch
        from pyrl_ext.rollout.remote.commands import keys_folder

        problem = None
        try:
            for address in plan.addresses:
                server_keys(keys_folder(plan), urlsplit(address).hostname or "")
        except ValueError as error:
            problem = str(error)
        yield Check("rollout.keys", f"{plan.rollout.keys or 'none'}", problem)
    if plan.log.wandb and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        key = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
        problem = "no WANDB_API_KEY and no ~/.netrc, expected a key. wandb login"
        yield Check("key of wandb", "available" if key else "none", None if key else problem)


def _rendezvous() -> Check:
    name = "rendezvous port"
    value = os.environ.get("MASTER_PORT")
    if value and not (value.isascii() and value.isdigit() and 0 < int(value) < 2**16):
        return Check(
            name, value, f"MASTER_PORT is {value!r}, expected a port, 1 to 65535. Unset it"
        )
    port = int(value or RENDEZVOUS)
    process = process_on("", port)
    if process is None:
        return Check(name, f"{port} is free")
    result = f"{port} is held by {process}"
    if not value:
        return Check(name, f"{result}; torchrun needs --standalone, or another port")
    return Check(name, result, f"{result}, expected a free one. Change MASTER_PORT")


def _engine(address: str, source: str, tls: ssl.SSLContext | None) -> Check:
    name = f"engine {address}"
    absence = absence_at(address, tls=tls)
    if absence is None:
        return Check(name, "answers")
    url = urlsplit(address)
    process = None if absence.is_taken else process_on(url.hostname or "", url.port or 80)
    held = f"; port {url.port} is held by {process}" if process else ""
    advice = f"expected an engine. Start it with: pyrl serve {source}"
    result = "another program" if absence.is_taken else "no answer"
    return Check(name, result, f"{absence.reason}{held}, {advice}")
