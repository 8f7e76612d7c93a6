"""Every GPU kernel compiles, and keeps its values in registers. Needs no GPU."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.compiler")

from benchmarks import binaries, sass
from benchmarks.gpu.graphs import contract
from tests.helpers.contract_cases import CASES, every_op
from tests.helpers.launch_shapes import launch_shapes
from tests.helpers.offline_triton import offline

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc").glob("*/*.cu"))
GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\s*\(")
TRITON = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


@pytest.mark.parametrize("name", launch_shapes())
def test_launch_compiles_for_hopper_without_spills(name: str):
    built = binaries.triton_binaries(name, 90)
    assert built
    for binary in built:
        assert binary.spills == 0, binary
        assert 0 < binary.registers <= 255, binary
        # a block of the smallest of these GPUs may ask for this much
        assert binary.shared <= 99 << 10, binary


@pytest.mark.parametrize("target", [80, 100])
def test_launch_shapes_compile_every_triton_kernel_without_spills(target: int, tmp_path: Path):
    with offline(tmp_path, target) as variants:
        for launch in launch_shapes().values():
            launch(16)
    binaries_of = [binaries.binary_of(variant, target) for variant in variants]
    assert [binary for binary in binaries_of if binary.spills] == []
    sources = ROOT.glob("pyrl_ext/ops/*/triton.py")
    written = {name for source in sources for name in TRITON.findall(source.read_text("utf-8"))}
    assert {variant.kernel for variant in variants} == written


def test_contract_compiles_with_every_triton_backend_that_takes_its_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled = set[str]()
    with offline(tmp_path, 90) as variants:
        for name, backends, args in contract(torch.device("meta")):
            for backend in (each for each in backends if each.name == "triton"):
                with monkeypatch.context() as interpreted:
                    interpreted.setenv("TRITON_INTERPRET", "1")  # any device will do
                    reason = backend.refuse(*args)
                if reason is None:
                    backend.run(*args)
                    compiled.add(CASES[name][0])
    assert variants
    with_triton = {n for n, op in every_op().items() if "triton" in [b.name for b in op.backends]}
    # rows are inverted by torch's sort, and the contract combines statistics in float64
    assert compiled == with_triton - {"invert_rows", "token_logprob_combine"}


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


def test_parse_counts_instructions_of_a_loop_and_the_bytes_it_moves():
    lines = [
        "        Function : _Z3addPf",
        "        /*0000*/                   LDC R1, c[0x0][0x28] ;",
        "        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;",
        "        /*0020*/               @P0 LDG.E R8, desc[UR4][R2.64] ;",
        "        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;",
        "        /*0040*/              @!P1 STG.E.U8 desc[UR4][R2.64], R4 ;",
        "        /*0050*/               @P2 BRA 0x10 ;",
        "        /*0060*/                   BRA 0x60 ;",
    ]
    ((name, code),) = sass.parse("\n".join(lines))
    assert name.startswith("add") and len(code) == 7
    assert sass.widths(code, "LDG") == "1x16 1x4" and sass.widths(code, "STG") == "1x1"
    assert sass.per_16_bytes(code) == 16 * 5 / 21
    assert sass.share(5.0, "H100") == 1 and sass.share(400.0, "H200") == 5.12 / 19
    assert sass.per_16_bytes(code[:2]) is None


def test_rows_are_those_of_every_cuda_kernel():
    file = binaries.extension()
    usage = binaries.read_usage(file) if file else []
    if file is None or not usage:
        pytest.skip("pyrl_ext._C was built without CUDA")
    found = {row[0]: row for row in sass.rows(file)}
    assert found.keys() == {b.kernel for b in usage}
    (wide,) = (row for name, row in found.items() if name == "gather_routes_kernel<uchar>")
    assert "x16" in wide[4] and "2x16" in wide[5]  # whole words in and out
