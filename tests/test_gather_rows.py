import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import gather_rows, use_backend
from pyrl_ext.ops.gather_rows import native, op, reference

SHAPES = {  # (N, C, M)
    "one": (1, 1, 1),
    "no rows": (5, 3, 0),
    "no source": (0, 3, 4),
    "no columns": (4, 0, 3),
    "odd": (63, 7, 100),
    "sixteen bytes": (40, 16, 70),
    "wide": (17, 1025, 33),
    "threads": (30_000, 5, 50_000),
}
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def case(shape, dtype=torch.float64, device="cpu"):
    N, C, M = SHAPES[shape]
    g = torch.Generator().manual_seed(0)
    src = torch.randint(0, 9, (N, C), generator=g).to(dtype)
    rows = torch.randint(-1, N, (M,), generator=g)
    run = min(N, M) // 2  # as a layout has it: consecutive rows
    rows[:run] = torch.arange(run)
    return src.to(device), rows.to(device), torch.arange(C).to(dtype).to(device)


@pytest.mark.parametrize("backend", [b for b in op.backends if b.name != "reference"], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backend_equals_reference(backend, device, shape):
    for dtype in DTYPES:
        args = case(shape, dtype, device)
        if reason := backend.refuse(*args):
            pytest.skip(reason)
        assert torch.equal(backend.run(*args), reference.gather_rows(*args)), dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 188])
def test_any_row_size_and_alignment(device, row_bytes):
    for offset in (0, 1, 2, 4, 8, 16):
        memory = torch.randint(0, 255, (offset + 50 * row_bytes,), dtype=torch.uint8).to(device)
        src = memory[offset:].view(50, row_bytes)
        rows = torch.randint(-1, 50, (77,)).to(device)
        fill = torch.arange(row_bytes, dtype=torch.uint8).to(device)
        if reason := native.refuse(src, rows, fill):
            pytest.skip(reason)
        expected = reference.gather_rows(src, rows, fill)
        assert torch.equal(native.gather_rows(src, rows, fill), expected), offset


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 8), max_size=40),
    width=st.integers(0, 40),
    threads=st.sampled_from([1, 2, 5]),
)
def test_equals_a_python_loop(rows, width, threads):
    src = torch.arange(9 * width, dtype=torch.int16).view(9, width)
    fill = torch.full((width,), -7, dtype=torch.int16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = gather_rows(src, torch.tensor(rows, dtype=torch.int64), fill)
    finally:
        torch.set_num_threads(before)
    assert out.tolist() == [(fill if row < 0 else src[row]).tolist() for row in rows]


def test_rows_of_any_rank_and_strides():
    rows = torch.tensor([2, -1, 0])
    tokens = torch.arange(6)[::2]
    assert gather_rows(tokens, rows, torch.tensor(-5)).tolist() == [4, -5, 0]
    routes = torch.arange(24).view(2, 4, 3).transpose(0, 2)  # [3, 4, 2]
    out = gather_rows(routes, rows, torch.zeros(4, 2, dtype=torch.int64))
    assert torch.equal(out, torch.stack([routes[2], torch.zeros_like(routes[0]), routes[0]]))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("shape", ["one", "no rows", "no source", "odd", "sixteen bytes"])
def test_gradcheck(shape, backend):
    src, rows, fill = case(shape)
    with use_backend(backend):
        assert torch.autograd.gradcheck(
            gather_rows, (src.requires_grad_(), rows, fill.requires_grad_())
        )


def test_padding_does_not_leak_into_the_gradient():
    src = torch.ones(2, 1, requires_grad=True)
    out = gather_rows(src, torch.tensor([0, -1, 0]), torch.zeros(1))
    (grad,) = torch.autograd.grad(out, src, torch.tensor([[1.0], [torch.nan], [2.0]]))
    assert grad.tolist() == [[3.0], [0.0]]


@pytest.mark.parametrize("shape", ["one", "no rows", "odd"])
def test_opcheck(shape):
    src, rows, fill = case(shape)
    torch.library.opcheck(op.overload, (src.requires_grad_(), rows, fill.requires_grad_()))


def test_compiles_without_a_graph_break():
    src, rows, fill = case("odd")
    compiled = torch.compile(
        lambda a, b, c: gather_rows(a, b, c) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(src, rows, fill), gather_rows(src, rows, fill) * 2)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("bad", [7, -2])
def test_row_out_of_range_names_the_entry(backend, bad):
    rows = torch.tensor([0, bad, bad])
    with use_backend(backend), pytest.raises(IndexError) as error:
        gather_rows(torch.zeros(3, 2), rows, torch.zeros(2))
    assert str(error.value) == (
        f"gather_rows: rows[1] is {bad}, expected -1 (fill) or a row of src in [0, 3)"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64), torch.zeros(3)), "fill [3]"),
        ((torch.zeros(3, 2), torch.zeros(1, dtype=torch.int32), torch.zeros(2)), "torch.int32"),
        (
            (torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64), torch.zeros(2).half()),
            "fill is torch.float16, expected src's torch.float32",
        ),
    ],
)
def test_arguments_that_do_not_fit(args, message):
    with pytest.raises((ValueError, TypeError)) as error:
        gather_rows(*args)
    assert message in str(error.value)


def test_a_named_backend_that_declines_is_an_error(monkeypatch):
    monkeypatch.setenv("PYRL_BACKEND", "triton")
    with pytest.raises(NotImplementedError, match="triton: src is on cpu, expected cuda"):
        gather_rows(*case("odd"))
    with use_backend("fast"), pytest.raises(NotImplementedError, match=r"\['native', 'triton'"):
        gather_rows(*case("odd"))


def test_triton_interpreted_on_the_cpu():
    script = """
from test_gather_rows import SHAPES, case
from pyrl_ext.ops import gather_rows, use_backend
import torch
for shape in set(SHAPES) - {"threads"}:
    for dtype in (torch.uint8, torch.float32):
        with use_backend("triton"):
            out = gather_rows(*case(shape, dtype))
        with use_backend("reference"):
            assert torch.equal(out, gather_rows(*case(shape, dtype))), (shape, dtype)
"""
    pytest.importorskip("triton")
    here = Path(__file__).parent
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{here}:{here.parent}"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=120)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_triton_compiles_for(capability):
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    from pyrl_ext.ops.gather_rows.triton_kernel import gather_rows_kernel

    pointers = dict(src="*fp32", rows="*i64", fill="*fp32", out="*fp32")
    signature = {**pointers, "C": "i32", "BLOCK": "constexpr"}
    source = compiler.ASTSource(
        fn=gather_rows_kernel, signature=signature, constexprs={"BLOCK": 128}
    )
    binary = compiler.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(binary.asm["cubin"]) > 1000
