"""Every GPU kernel is compiled: ``python -m benchmarks.gpu.kernels``. Needs no GPU.

Triton's variants are compiled from real launches on tensors without data: those of runs of
GLM-4.7-Flash, and those of every case of the operators' contract. The CUDA C++ kernels of ``csrc``
are looked for in the extension, for every target.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.binaries import TARGETS, extension, read_usage
from benchmarks.gpu.graphs import contract
from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.rows import ABSENT, FAILED, note, noting
from pyrl_ext.ops._op import Backend
from pyrl_ext.plan import compile_plan
from pyrl_ext.tools.prebuild.kernels import build, offline

GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\s*\(")
LAYOUT = ("hardware.gpu=H200", "parallel.cp=2", "parallel.dp=4")  # attention gathers rows, too
HEADS = {"fused head": (), "logits": ("logprob.head=logits", "logprob.accept_rounded_logits=on")}
TARGET = 90


def launches_of_runs() -> None:
    for head, more in HEADS.items():
        plan = compile_plan(ROOT / "configs" / "glm47.yaml", [*LAYOUT, *more])

        def say(line: str, head: str = head) -> None:
            name, _, text = line.partition(": ")
            note(f"Triton, a run with {head}: {name}", text=text)

        with tempfile.TemporaryDirectory() as folder, noting(f"Triton, a run with {head}"):
            build(plan, Path(folder), say)


def launches_of_the_contract() -> None:
    """Triton's backend of each operator, as it is called for each case of the contract."""
    device = torch.device("meta")
    with tempfile.TemporaryDirectory() as folder, offline(Path(folder), TARGET) as found:
        for name, backends, args in contract(device):
            shown = f"Triton, contract: {name}"
            for backend in (each for each in backends if each.name == "triton"):
                if reason := refusal(backend, args):
                    note(shown, ABSENT, reason)
                    continue
                before = len(found)
                with noting(shown):
                    backend.run(*args)
                    note(shown, launches=len(found) - before)


def refusal(backend: Backend, args: tuple[Any, ...]) -> str | None:
    """Why the backend takes no such call on a GPU, or None."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # any device will do; nothing is compiled in here
    try:
        return backend.refuse(*args)
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def cuda_kernels() -> None:
    file = extension()
    found = read_usage(file) if file else []
    if not found:
        why = "it was built without CUDA" if file else "it is not built"
        note("CUDA C++: the extension", ABSENT, why)
        return
    built = {(binary.kernel.partition("<")[0], binary.target) for binary in found}
    spilled = {binary.kernel for binary in found if binary.spills}
    for source in sorted((ROOT / "csrc").glob("*/*.cu")):
        for name in GLOBAL.findall(source.read_text("utf-8")):
            missing = [f"sm_{target}" for target in TARGETS if (name, target) not in built]
            why = f"no binary for {', '.join(missing)}" if missing else ""
            why = why or ("it spills" if any(k.startswith(name) for k in spilled) else "")
            variants = sum(binary.kernel.partition("<")[0] == name for binary in found)
            note(f"CUDA C++: {name}", FAILED if why else "ok", why, binaries=variants)


def main() -> None:
    launches_of_runs()
    launches_of_the_contract()
    with noting("CUDA C++"):
        cuda_kernels()


if __name__ == "__main__":
    main()
