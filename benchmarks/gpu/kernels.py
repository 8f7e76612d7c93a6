"""Every GPU kernel is compiled: ``python -m benchmarks.gpu.kernels``. Needs no GPU.

Triton's variants are compiled from the very launches of a run of GLM-4.7-Flash, on tensors without
data; the CUDA C++ kernels of ``csrc`` are looked for in the extension, for every target.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from benchmarks.binaries import TARGETS, extension, read_usage
from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.rows import ABSENT, FAILED, note, noting
from pyrl_ext.plan import compile_plan
from pyrl_ext.tools.prebuild import build

GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\s*\(")
MORE = ("hardware.gpu=H200", "parallel.cp=2", "parallel.dp=4")  # attention gathers rows, too


def triton_kernels() -> None:
    plan = compile_plan(ROOT / "configs" / "glm47.yaml", MORE)
    with tempfile.TemporaryDirectory() as folder:

        def say(line: str) -> None:
            name, _, rest = line.partition(": ")
            note(f"Triton: {name}", text=rest)

        build(plan, Path(folder), say)


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
    with noting("Triton"):
        triton_kernels()
    with noting("CUDA C++"):
        cuda_kernels()


if __name__ == "__main__":
    main()
