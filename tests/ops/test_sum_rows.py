import mmap
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import Inverse, invert_rows, sum_rows, use_backend
from pyrl_ext.ops._arguments import FLOATS
from pyrl_ext.ops._native import C
from pyrl_ext.ops.sum_rows import native, reference
from tests.helpers import emulated
from tests.helpers.threads import on_threads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ISAS = [isa for isa in ("avx512", "avx2", "portable") if C.has_isa(isa)]

SHAPES = {  # (N, M, what follows M)
    "one": (1, 1, (1,)),
    "no rows": (5, 0, (3,)),
    "no sums": (0, 4, (3,)),
    "no columns": (4, 3, (0,)),
    "scalars": (60, 100, ()),
    "repeated": (3, 300, (7,)),
    "once": (400, 100, (2, 4)),
    "wide": (17, 33, (1025,)),
    "threads": (30_000, 50_000, (5,)),
}


def case(shape, dtype=torch.float64, device="cpu"):
    N, M, rest = SHAPES[shape]
    g = torch.Generator().manual_seed(0)
    src = torch.randn(M, *rest, generator=g, dtype=torch.float64).to(dtype)
    rows = torch.randint(-1, N, (M,), generator=g)
    return src.to(device), rows.to(device), invert_rows(rows.to(device), N)


def with_isa(isa):
    return partial(native.sum_rows, isa=isa)


@pytest.mark.parametrize("run", [emulated.sum_rows, *map(with_isa, ISAS)], ids=["emulated", *ISAS])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_rows_kernels_equal_the_reference(run, shape):
    for dtype in FLOATS:
        src, rows, inverse = case(shape, dtype)
        expected = reference(src, rows, *inverse)
        assert torch.equal(run(src, rows, *inverse), expected), dtype
        if src.ndim > 1:  # other strides and alignments
            strided = torch.cat([src[:, :1], src], dim=1)[:, 1:]
            assert native.rows_of(strided) is strided or not strided.numel()
            assert torch.equal(run(strided, rows, *inverse), expected), dtype


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_rows_on_a_gpu_equals_the_reference(backend, shape):
    for dtype in FLOATS:
        src, rows, inverse = case(shape, dtype)
        expected = reference(src, rows, *inverse)
        with use_backend(backend):
            out = sum_rows(src.cuda(), rows.cuda(), Inverse(*(t.cuda() for t in inverse)))
        assert torch.equal(out.cpu(), expected), dtype


@pytest.mark.parametrize("run", [emulated.sum_rows, *map(with_isa, ISAS)], ids=["emulated", *ISAS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sum_rows_reads_every_16_bit_number(run, dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    rows = torch.arange(2**15).repeat_interleave(2)[torch.randperm(2**16)]
    inverse = invert_rows(rows, 2**15)
    expected = reference(numbers, rows, *inverse)
    out = run(numbers, rows, *inverse)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    copied = run(numbers, torch.arange(2**16), *invert_rows(torch.arange(2**16), 2**16))
    assert torch.equal(copied.view(torch.int16), numbers.view(torch.int16))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 8), max_size=40),
    width=st.integers(0, 20),
    threads=st.sampled_from([1, 2, 5]),
)
def test_sum_rows_equals_a_python_loop(rows, width, threads):
    src = torch.randn(len(rows), width)
    index = torch.tensor(rows, dtype=torch.int64)
    with on_threads(threads):
        out = sum_rows(src, index, invert_rows(index, 9))
    expected = torch.zeros(9, width)
    for m, row in enumerate(rows):
        if row >= 0:
            expected[row] += src[m]
    assert torch.equal(out, expected)


def test_sum_rows_adds_in_fp32_and_rounds_once():
    src = torch.tensor([256.0] + [1.0] * 256, dtype=torch.bfloat16)  # 256 + 1 is 256 in bf16
    rows = torch.zeros(257, dtype=torch.int64)
    assert sum_rows(src, rows, invert_rows(rows, 1)).tolist() == [512]


@pytest.mark.parametrize("run", [emulated.sum_rows, native.sum_rows])
def test_sum_rows_takes_more_elements_than_32_bits_count(run):
    size = 5 * 2**30  # bytes of address space; only the pages touched are backed
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.bfloat16)
    far = memory[: 5 * 2**29].view(-1, 2**29)[:, :3]  # 2^30 bytes from a row to the next
    far[:] = torch.tensor([1.0, 2.0, 4.0])
    far[4] = 8
    rows = torch.tensor([0, 1, 0, -1, 0])
    assert run(far, rows, *invert_rows(rows, 2)).tolist() == [[10, 12, 16], [1, 2, 4]]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("shape", ["one", "no rows", "no sums", "scalars", "repeated"])
def test_sum_rows_has_gradients_of_both_orders(shape, backend):
    src, rows, inverse = case(shape)

    def total(src):
        return sum_rows(src, rows, inverse)

    with use_backend(backend):
        src = (src[:30, :2] if src.ndim > 1 else src[:30]).requires_grad_()
        rows = rows[:30]
        inverse = invert_rows(rows, SHAPES[shape][0])
        assert torch.autograd.gradcheck(total, src)
        assert torch.autograd.gradgradcheck(total, src)


def test_sum_rows_compiles_without_a_graph_break():
    src, rows, inverse = case("repeated")
    results = []
    for f in (sum_rows, torch.compile(sum_rows, fullgraph=True, backend="aot_eager")):
        out = f(src.requires_grad_(), rows, inverse)
        results.append((out, *torch.autograd.grad(out, src, torch.ones_like(out))))
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(*results))


def triton_equals_reference():
    for shape in set(SHAPES) - {"threads"}:
        for dtype in FLOATS:
            src, rows, inverse = case(shape, dtype)
            if dtype == torch.bfloat16:  # the interpreter cuts what it should round: whole numbers
                src = (src > 1).to(dtype)
            for strided in (src, src.repeat(2, *[1] * (src.ndim - 1))[: len(src)]):
                with use_backend("triton"):
                    out = sum_rows(strided, rows, inverse)
                with use_backend("reference"):
                    assert torch.equal(out, sum_rows(src, rows, inverse)), (shape, dtype)
