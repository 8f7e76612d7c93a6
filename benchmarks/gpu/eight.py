"""The first hour on several GPUs, the most expensive questions first.

``python -m benchmarks.gpu.eight [--dry-run] [--only PART,...] [--resume]`` takes the options of
`benchmarks.gpu`. Jobs that need more GPUs than the machine has are rows "not run" with that reason.
``--dry-run`` needs none: `groups`, `parity` and `modules` run on two ranks of the CPU, over gloo,
and the plans of all runs are compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.parts import DRY_SECONDS, Part
from benchmarks.gpu.step import gpu_name

# every feature of a layout alone, then together, and with dynamic context parallelism
PARITY = {
    2: ("tp2", "pp2", "dp2 ep2", "cp2", "dp2 distributed", "dp2 dynamic:2"),
    4: ("dp2 pp2 vpp2 dynamic:2", "dp2 tp2 ep2 dynamic:2", "dp4 ep4 dynamic:4 distributed"),
    8: (
        "tp2 pp2 cp2 ep2 etp1",
        "dp2 pp2 vpp2 cp2 ep4",
        "tp2 cp2 dp2 ep8 etp1 distributed overlapped",
        "dp2 tp2 pp2 vpp2 ep2 dynamic:2 recompute:full",
        "dp8 ep4 dynamic:8",
    ),
}
TINY = ("configs/tiny_qwen3.yaml", "device=cuda", "model.dtype=bfloat16", "steps=3")
VISION = "configs/tiny_vl.yaml"


@cache
def gpus() -> int:
    """Number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def several(part: str, name: str, ranks: int, command: tuple[str, ...], limit: float) -> Job:
    """A job for ``ranks`` GPUs."""
    absent = f"it needs {ranks} GPUs, torch sees {gpus()}" if gpus() < ranks else ""
    return Job(part, name, command, limit, absent)


def glm(layers: int, *options: str) -> tuple[str, ...]:
    """A short run of GLM-4.7-Flash with random weights and so many layers on eight GPUs."""
    config = ("--layers", str(layers), "configs/glm47.yaml", "steps=3", "optimizer.warmup_steps=0")
    weights = ("model.weights=null", "model.tokenizer=tiny")
    # without both, 47 layers do not fit 8 H100
    memory = ("rollout.offload_trainer=all", "logprob.chunk_bytes=1GiB")
    device = f"hardware.gpu={gpu_name('cuda')}"
    return measured(8, *config, *weights, device, *memory, "log.profile=[1]", *options)


def plans(jobs: Iterator[Job]) -> Iterator[Job]:
    """For each short run, its plan alone."""
    for job in jobs:
        interpreter, *options = job.command[1:]
        command = ("-m", interpreter, "--plan", *options)
        yield Job(job.part, f"plan of {job.name}", command, DRY_SECONDS)


def torchrun(ranks: int, *program: str) -> tuple[str, ...]:
    """The arguments of Python that run ``program`` on so many ranks of this host."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return (*launcher, "-m", *program)


def measured(ranks: int, *options: str) -> tuple[str, ...]:
    """A short run, with its metrics as rows."""
    return ("-m", "benchmarks.gpu.short_run", "--ranks", str(ranks), *options)


def groups() -> Iterator[Job]:
    for ranks in (2, 4, 8):
        command = torchrun(ranks, "benchmarks.gpu.groups")
        yield several("groups", f"{ranks} ranks", ranks, command, 180)


def groups_dry() -> Iterator[Job]:
    command = torchrun(2, "benchmarks.gpu.groups", "--device", "cpu")
    yield Job("groups", "2 ranks of the CPU", command, DRY_SECONDS)


def parity() -> Iterator[Job]:
    for ranks, layouts in PARITY.items():
        titles = [f"{layout}, {model}" for layout in layouts for model in ("glm", "qwen")]
        options = ("--ranks", str(ranks), "--device", "cuda", "--titles", *titles)
        yield several("parity", f"{ranks} ranks", ranks, ("-m", "tests.parity", *options), 420)


def parity_dry() -> Iterator[Job]:
    command = ("-m", "tests.parity", "--ranks", "2", "--titles", "tp2, qwen")
    yield Job("parity", "tp2 on the CPU", command, DRY_SECONDS)


def modules() -> Iterator[Job]:
    """Towers and their readers: both ways of a swap, stages that read from separate ranks."""
    runs = {
        "shared tower, dp 2": (2, "parallel.dp=2", "parallel.ep=2"),
        "tower on two ranks, pp 2": (
            4,
            "parallel.pp=2",
            "modules.vision.ranks=own",
            "modules.vision.parallel.dp=2",
        ),
        "shared tower, dp 2 and cp 2": (4, "parallel.dp=2", "parallel.cp=2", "parallel.ep=2"),
    }
    for name, (ranks, *overrides) in runs.items():
        command = measured(ranks, VISION, "device=cuda", "steps=3", *overrides)
        yield several("modules", name, ranks, command, 240)


def modules_dry() -> Iterator[Job]:
    options = (VISION, "parallel.dp=2", "parallel.ep=2", "steps=2")
    yield Job("modules", "shared tower, dp 2, on the CPU", measured(2, *options), DRY_SECONDS)
    yield from plans(modules())


def vllm() -> Iterator[Job]:
    """vLLM in the trainer's processes with its own routes, which sleeps between rollouts."""
    missing = "" if find_spec("vllm") else "vllm is not installed: pip install '.[vllm]'"
    for tp in (1, 2, 4):
        options = ("rollout.engine=vllm", "rollout.sleep=true", f"rollout.tp={tp}")
        layout = (f"parallel.dp={tp}", f"parallel.ep={tp}", "rollout.max_mismatch=0.1")
        command = measured(tp, *TINY, *options, *layout)
        job = several("vllm", f"tp {tp}", tp, command, 420)
        yield Job("vllm", job.name, command, job.limit, job.absent or missing)


def vllm_dry() -> Iterator[Job]:
    yield from plans(vllm())


def steps() -> Iterator[Job]:
    """Whole steps of GLM-4.7-Flash with random weights: weight sync, rollout, scores, update."""
    for layers in (4, 47):
        yield several("steps", f"glm47, {layers} layers", 8, glm(layers), 900)


def steps_dry() -> Iterator[Job]:
    yield from plans(steps())


def engine() -> Iterator[Job]:
    """TransformerEngine against the local layers, and FP8, last."""
    missing = "" if find_spec("transformer_engine") else "transformer_engine is not installed"
    for name, options in (("te", ()), ("te fp8", ("model.fp8=blockwise",))):
        command = glm(4, "model.backend=te", *options)
        job = several("te", f"glm47, 4 layers, {name}", 8, command, 600)
        yield Job("te", job.name, job.command, job.limit, job.absent or missing)


def engine_dry() -> Iterator[Job]:
    yield from plans(engine())


PARTS = {
    "groups": Part("every communicator: seconds, memory; messages both ways", groups, groups_dry),
    "parity": Part("layouts over NCCL against one GPU", parity, parity_dry),
    "modules": Part("towers on shared and own ranks", modules, modules_dry),
    "vllm": Part("vLLM in the trainer's processes: routes, sleep, wake", vllm, vllm_dry),
    "steps": Part("whole steps of GLM-4.7-Flash next to the plan", steps, steps_dry),
    "te": Part("the same with TransformerEngine, then FP8", engine, engine_dry),
}


if __name__ == "__main__":
    sys.exit(main(parts=PARTS, name="gpu8"))
