"""The parts of ``make gpu``, and the jobs of each; with ``--dry-run`` the jobs that need no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.cases import FAMILIES
from benchmarks.gpu.jobs import ROOT, Job

# what a test file says whose tests may need a GPU; vLLM has a command for itself
SIGN = "torch.cuda.is_available()"
APART = ("tests/rollout/vllm/",)
TOOLS = ("memcheck", "racecheck", "synccheck")
FLAGS = ("--kernel-regex", "--kernel-name", "--filter")  # of newer and older sanitizers
ON_HOST = ("layout",)  # families whose cases are about the host
# tests of kernels that were changed after their last run on a GPU
CHANGED = tuple(
    f"tests/ops/test_{name}.py" for name in ("gather_fields", "rms_norm", "gather_routes")
)
MISSED_BARS = ("replay_probs", "token_logprob")  # families that were slower than their bar
DRY_SECONDS = 900.0  # of a job without a GPU: only a hang takes as long, also on a loaded machine


class Part(NamedTuple):
    """Jobs that belong together.

    Args:
        what:  one line for the report.
        jobs:  on a GPU.
        dry:   without one.
        lanes: jobs at a time; 1 where times are measured.
    """

    what: str
    jobs: Callable[[], Iterator[Job]]
    dry: Callable[[], Iterator[Job]]
    lanes: int = 1


def gpu_test_files() -> list[str]:
    """Test files with tests for a GPU."""
    files = (ROOT / "tests").rglob("test_*.py")
    found = (f.relative_to(ROOT).as_posix() for f in files if SIGN in f.read_text("utf-8"))
    return sorted(name for name in found if not name.startswith(APART))


def pytest(*options: str) -> tuple[str, ...]:
    """The command of the tests that need a GPU."""
    plugins = ("-p", "benchmarks.gpu.only_gpu", "-p", "no:cacheprovider")
    return ("-m", "pytest", "-q", "-rf", "--no-header", *plugins, *options)


def module(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.gpu.{name}", *options)


def changed() -> Iterator[Job]:
    for file in CHANGED:
        yield Job("changed", file, pytest(file), 240)
    yield Job("changed", "100 steps of the demo in bfloat16", module("demo"), 420)


def changed_dry() -> Iterator[Job]:
    yield Job("changed", "collected", pytest("--collect-only", *CHANGED), DRY_SECONDS)


def tests() -> Iterator[Job]:
    for file in gpu_test_files():
        if file not in CHANGED:
            yield Job("tests", file, pytest(file), 240)


def tests_dry() -> Iterator[Job]:
    yield Job("tests", "collected", pytest("--collect-only", *gpu_test_files()), DRY_SECONDS)


@cache
def sanitizer() -> tuple[str, tuple[str, ...]]:
    """compute-sanitizer's path ("": it is not installed), and options that choose our kernels."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        return "", ()
    told = subprocess.run([found, "--help"], capture_output=True, text=True).stdout
    flag = next((flag for flag in FLAGS if flag in told), None)
    folders = sorted(file.parent.name for file in (ROOT / "csrc").glob("*/gpu.cu"))
    return found, tuple(x for name in folders if flag for x in (flag, f"kns={name}"))


def sanitized() -> Iterator[Job]:
    program, chosen = sanitizer()
    absent = "" if program else "compute-sanitizer is not installed"
    options = ("--target-processes", "all", "--error-exitcode", "86", *chosen)
    files = [f for f in gpu_test_files() if f.startswith("tests/ops/")]
    for tool in TOOLS:
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
        for file in files:
            ours = (program, "--tool", tool, *options, sys.executable)
            job = Job("sanitizer", f"{tool} {file}", pytest(file), 240, absent, ours, alone)
            yield job


def sanitized_dry() -> Iterator[Job]:
    program, _ = sanitizer()
    absent = "" if program else "compute-sanitizer is not installed"
    yield Job("sanitizer", "version", ("--version",), DRY_SECONDS, absent, (program,))


def rates() -> Iterator[Job]:
    yield Job("rates", "rates", module("rates"), 120)


def rates_dry() -> Iterator[Job]:
    yield Job("rates", "tiny sizes, on the CPU", module("rates", "--device", "cpu"), DRY_SECONDS)


def bench() -> Iterator[Job]:
    for family in sorted(FAMILIES, key=lambda family: family not in MISSED_BARS):
        if family not in ON_HOST:
            yield Job("bench", family, module("bench", family), 240)


def bench_dry() -> Iterator[Job]:
    families = [family for family in FAMILIES if family not in ON_HOST]
    yield Job("bench", "cases on meta tensors", module("bench", "--build", *families), DRY_SECONDS)


def step() -> Iterator[Job]:
    missing = find_spec("transformer_engine") is None
    for backend in ("local", "te"):
        absent = "no transformer_engine: make .venv/.te" if backend == "te" and missing else ""
        for rows in (16384, 32768):
            for layers in (1, 4):
                name = f"{layers} layer{'s' * (layers > 1)}, {rows} rows, {backend}"
                options = ("--layers", str(layers), "--backend", backend, "--rows", str(rows))
                yield Job("step", name, module("step", *options), 180, absent)


def step_dry() -> Iterator[Job]:
    options = ("--plan", "--layers", "1", "4", "--backend", "local", "te")
    yield Job("step", "plans", module("step", *options), DRY_SECONDS)


def graphs() -> Iterator[Job]:
    yield Job("graphs", "operators", module("graphs"), 120)


def graphs_dry() -> Iterator[Job]:
    yield Job("graphs", "plain calls, on the CPU", module("graphs", "--eager"), DRY_SECONDS)


def vllm() -> Iterator[Job]:
    absent = "" if find_spec("vllm") else "vllm is not installed: pip install '.[vllm]'"
    command = ("-m", "pytest", "-q", "-rs", "tests/rollout/vllm/test_gpu.py")
    yield Job("vllm", "routes, sleep, wake, weights by IPC", command, 600, absent)


def kernels() -> Iterator[Job]:
    command = ("-m", "pytest", "-q", "-rs", "tests/ops/test_kernels_compile.py")
    yield Job("kernels", "compiled", command, DRY_SECONDS)


def nothing() -> Iterator[Job]:
    yield from ()


# in the order in which minutes on a GPU answer most: what changed since its last run comes first
PARTS = {
    "changed": Part("what has not run since it was changed", changed, changed_dry, lanes=2),
    "step": Part("a step of GLM-4.7-Flash's true widths, local and te", step, step_dry),
    "vllm": Part("vLLM on this GPU", vllm, nothing),
    "bench": Part("benchmarks next to their floors, in one run", bench, bench_dry),
    "tests": Part("every other test that needs a GPU", tests, tests_dry, lanes=6),
    "rates": Part("rates that the plan assumes", rates, rates_dry),
    "graphs": Part("CUDA graphs of the operators", graphs, graphs_dry),
    "kernels": Part("kernels compiled for the GPU", kernels, kernels),
    "sanitizer": Part("compute-sanitizer over the kernels' tests", sanitized, sanitized_dry, 6),
}
