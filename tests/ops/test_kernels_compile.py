"""Every GPU kernel compiles for every target and keeps its values in registers. Needs no GPU."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton.compiler")

from benchmarks import binaries

SOURCES = sorted((Path(__file__).parents[2] / "csrc").glob("*/*.cu"))
GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\s*\(")


@pytest.mark.parametrize("target", binaries.TARGETS)
@pytest.mark.parametrize("name", binaries.triton_builds())
def test_build_triton_compiles_without_spills(name, target):
    built = binaries.build_triton(name, target)
    assert built.spills == 0, built
    assert 0 < built.registers <= 255, built
    assert built.shared <= 99 << 10, built  # what a block of the smallest of these GPUs may ask for


def test_triton_builds_names_every_triton_kernel():
    ops = {file.parent.name for file in binaries.PACKAGE.glob("ops/*/triton_kernel.py")}
    assert ops == {name.split()[0] for name in binaries.triton_builds()}


def test_read_usage_finds_cuda_kernels_for_every_target_and_no_spills():
    file = binaries.extension()
    if file is None:
        pytest.skip("pyrl_ext._C is not built")
    found = binaries.read_usage(file)
    if not found:
        pytest.skip("pyrl_ext._C was built without CUDA")
    assert sorted({b.target for b in found}) == list(binaries.TARGETS)
    kernels = {b.kernel for b in found}
    missing = [(k, t) for k in kernels for t in binaries.TARGETS if (k, t) not in by_name(found)]
    assert not missing, f"kernels without a binary for a target: {missing}"
    assert [b for b in found if b.spills] == []
    written = {
        name for source in SOURCES for name in GLOBAL.findall(source.read_text(encoding="utf-8"))
    }
    absent = written - {k.partition("<")[0] for k in kernels}
    assert not absent, f"no binary of {absent} in {file.name}: build it again"


def by_name(found):
    return {(b.kernel, b.target) for b in found}


def test_parse_reads_what_cuobjdump_prints():
    text = """
Fatbin elf code:
================
arch = sm_90
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN4pyrl12_GLOBAL__N_13addIjLi4EEEvPKT_l:
  REG:40 STACK:8 SHARED:512 LOCAL:16 CONSTANT[0]:404 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert list(binaries.parse(text)) == [binaries.Binary("add<uint, 4>", 90, 40, 24, 512)]
    assert binaries.readable("gather_rows_kernel") == "gather_rows_kernel"
