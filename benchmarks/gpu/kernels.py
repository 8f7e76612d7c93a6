"""Every GPU kernel is compiled: ``python -m benchmarks.gpu.kernels``. Needs no GPU.

Triton's variants are compiled from real launches on tensors without data: those of
`tests.helpers.launch_shapes`, and those of every case of the operators' contract. The CUDA C++
kernels of ``csrc`` are looked for in the extension, for every target.
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
from tests.helpers.launch_shapes import ROWS, launch_shapes
from tests.helpers.offline_triton import offline

GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\s*\(")
TARGET = 90


def launches_of_models() -> None:
    """Triton's kernels with the shapes of real models, for every target."""
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as folder, offline(Path(folder), target) as variants:
            for name, launch in launch_shapes().items():
                before = len(variants)
                with noting(f"Triton, sm_{target}: {name}"):
                    for rows in ROWS:
                        launch(rows)
                    note(f"Triton, sm_{target}: {name}", variants=len(variants) - before)


def launches_of_the_contract() -> None:
    """Triton's backend of each operator, as it is called for each case of the contract."""
    device = torch.device("meta")
    with tempfile.TemporaryDirectory() as folder, offline(Path(folder), TARGET) as variants:
        for name, backends, args in contract(device):
            shown = f"Triton, contract: {name}"
            for backend in (each for each in backends if each.name == "triton"):
                if reason := refusal(backend, args):
                    note(shown, ABSENT, reason)
                    continue
                before = len(variants)
                with noting(shown):
                    backend.run(*args)
                    note(shown, launches=len(variants) - before)


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
    launches_of_models()
    launches_of_the_contract()
    with noting("CUDA C++"):
        cuda_kernels()


if __name__ == "__main__":
    main()
