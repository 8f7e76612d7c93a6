import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from pyrl_ext.ops import gather_rows, invert_rows, use_backend
from pyrl_ext.ops.gather_rows import inverse, native, op, reference
from tests.helpers import emulated
from tests.helpers.threads import on_threads

SHAPES = {  # (N, C, M)
    "one": (1, 1, 1),
    "no rows": (5, 3, 0),
    "no source": (0, 3, 4),
    "no columns": (4, 0, 3),
    "odd": (63, 7, 100),
    "sixteen bytes": (40, 16, 70),
    "few": (5, 16, 9),
    "few, odd": (6, 3, 11),
    "wide": (17, 1025, 33),
    "threads": (30_000, 5, 50_000),
}
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def case(shape, dtype=torch.float64, device="cpu"):
    N, C, M = SHAPES[shape]
    g = torch.Generator().manual_seed(0)
    src = torch.randint(0, 9, (N, C), generator=g).to(dtype)
    rows = torch.randint(-1, N, (M,), generator=g)
    run = min(N, M) // 2  # as a layout has it: consecutive rows
    rows[:run] = torch.arange(run)
    return src.to(device), rows.to(device), torch.arange(C).to(dtype).to(device)


@pytest.mark.parametrize(
    "backend", [b for b in op.backends if b.name != "reference"], ids=lambda b: b.name
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_rows_backends_equal_the_reference(backend, device, shape):
    for dtype in DTYPES:
        args = case(shape, dtype, device)
        if reason := backend.refuse(*args):
            pytest.skip(reason)
        assert torch.equal(backend.run(*args), reference(*args)), dtype
        zeros = *args[:2], None
        assert torch.equal(backend.run(*zeros), reference(*zeros)), dtype


@pytest.mark.parametrize("shape", SHAPES)
def test_gather_rows_cuda_threads_on_the_host_equal_the_reference(shape):
    for dtype in DTYPES:
        args = case(shape, dtype)
        assert torch.equal(emulated.gather_rows(*args), reference(*args)), dtype
        zeros = *args[:2], None
        assert torch.equal(emulated.gather_rows(*zeros), reference(*zeros)), dtype


@pytest.mark.parametrize("run", [native.gather_rows, emulated.gather_rows])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 188, 512, 8192])
def test_gather_rows_takes_any_row_size_stride_and_alignment(device, row_bytes, run):
    if run is emulated.gather_rows and device == "cuda":
        pytest.skip("it runs on the host")
    for offset, stride in [(0, 0), (1, 0), (2, 2), (4, 4), (8, 8), (16, 16), (0, 5), (3, 188)]:
        size = offset + 50 * (row_bytes + stride)
        memory = torch.randint(0, 255, (size,), dtype=torch.uint8).to(device)
        src = memory[offset:].view(50, row_bytes + stride)[:, :row_bytes]
        rows = torch.randint(-1, 50, (77,)).to(device)
        rows[:30] = torch.arange(30, device=device)
        fill = torch.arange(row_bytes, device=device).to(torch.uint8)
        if reason := native.refuse(src, rows, fill):
            pytest.skip(reason)
        expected = reference(src, rows, fill)
        assert torch.equal(run(src, rows, fill), expected), (offset, stride)


@pytest.mark.parametrize("run", [native.gather_rows, emulated.gather_rows])
def test_gather_rows_takes_more_elements_than_32_bits_count(run):
    size = 3 * 2**30 + 40  # bytes of address space; only the pages touched are backed
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    memory[-5:] = 7
    fill = torch.tensor([9], dtype=torch.uint8)
    rows = torch.tensor([size - 6, size - 5, -1, size - 1, 0])
    assert run(memory[:, None], rows, fill).flatten().tolist() == [0, 7, 9, 7, 0]
    far = memory[3 :: 2**30][:, None]  # 2^30 bytes from a row to the next
    memory[2**31 + 3] = 5
    assert run(far, torch.tensor([2, 1, 3]), fill).flatten().tolist() == [5, 0, 0]


@pytest.mark.parametrize("strided", ["rows", "repeated", "within"])
def test_gather_rows_takes_a_strided_source(strided):
    whole = torch.arange(60 * 5 * 4).view(60, 5, 4)
    src = {
        "rows": whole[:, 1:3],
        "repeated": whole[:1, 1:3].expand(60, -1, -1),
        "within": whole[:, 1:3].transpose(1, 2),
    }[strided]
    assert (native.rows_of(src) is src) == (strided != "within")
    rows = torch.tensor([3, 4, 5, -1, 59, 0])
    fill = torch.zeros_like(src[0])
    expected = reference(src, rows, fill)
    assert torch.equal(native.gather_rows(src, rows, fill), expected)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 8), max_size=40),
    width=st.integers(0, 40),
    threads=st.sampled_from([1, 2, 5]),
)
def test_gather_rows_equals_a_python_loop(rows, width, threads):
    src = torch.arange(9 * width, dtype=torch.int16).view(9, width)
    fill = torch.full((width,), -7, dtype=torch.int16)
    with on_threads(threads):
        out = gather_rows(src, torch.tensor(rows, dtype=torch.int64), fill)
    assert out.tolist() == [(fill if row < 0 else src[row]).tolist() for row in rows]


def test_gather_rows_takes_rows_of_any_rank_and_strides():
    rows = torch.tensor([2, -1, 0])
    tokens = torch.arange(6)[::2]
    assert gather_rows(tokens, rows, torch.tensor(-5)).tolist() == [4, -5, 0]
    routes = torch.arange(24).view(2, 4, 3).transpose(0, 2)  # [3, 4, 2]
    out = gather_rows(routes, rows, torch.zeros(4, 2, dtype=torch.int64))
    assert torch.equal(out, torch.stack([routes[2], torch.zeros_like(routes[0]), routes[0]]))


@pytest.mark.parametrize("given", [False, True], ids=["made in the backward", "given"])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("shape", ["one", "no rows", "no source", "few, odd"])
def test_gather_rows_has_gradients_of_both_orders(shape, backend, given):
    src, rows, fill = case(shape)
    map_ = invert_rows(rows, len(src)) if given else None

    def gather(src, fill):
        return gather_rows(src, rows, fill, map_)

    with use_backend(backend):
        inputs = src.requires_grad_(), fill.requires_grad_()
        assert torch.autograd.gradcheck(gather, inputs)
        assert torch.autograd.gradgradcheck(gather, inputs)


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_gather_rows_on_a_gpu_has_a_gradient_without_inverse(backend):
    src, rows, fill = case("odd", torch.float32)
    gather_rows(src.requires_grad_(), rows, fill).sum().backward()
    there = src.detach().cuda().requires_grad_()
    with use_backend(backend):
        gather_rows(there, rows.cuda(), fill.cuda()).sum().backward()
    torch.testing.assert_close(there.grad, src.grad, check_device=False)


def test_gather_rows_has_the_gradient_of_a_strided_source():
    whole = torch.randn(9, 3, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([1, -1, 8, 1])
    out = gather_rows(whole[:, 1:], rows, torch.zeros(2, 4, dtype=torch.float64))
    (grad,) = torch.autograd.grad(out.sum(), whole)
    expected = torch.zeros(9, 3, 4, dtype=torch.float64)
    expected[1, 1:], expected[8, 1:] = 2, 1
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("backend", inverse.op.backends, ids=lambda b: b.name)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_invert_rows_lists_the_places_of_every_row(backend, device, shape):
    src, rows, _ = case(shape, device=device)
    if reason := backend.refuse(rows, len(src)):
        pytest.skip(reason)
    starts, order = backend.run(rows, len(src))
    assert starts.shape == (len(src) + 1,) and order.shape == rows.shape
    assert starts.dtype == order.dtype == torch.int64
    places = [[] for _ in src]
    for m, row in enumerate(rows.tolist()):
        if row >= 0:
            places[row].append(m)
    flat = [m for found in places for m in found]
    assert order.tolist() == flat + [-1] * (len(rows) - len(flat))
    assert starts.diff().tolist() == [len(found) for found in places] and starts[0] == 0


def test_invert_rows_of_a_gpu_are_torchs_sort_whoever_is_named():
    """So a gradient without `inverse` has a kernel there under every name."""
    with FakeTensorMode():  # a GPU's tensor without a GPU
        rows = torch.empty(5, dtype=torch.int64, device="cuda")
    takes = {b.name: b.run for b in inverse.op.backends if b.refuse(rows, 3) is None}
    assert takes == dict.fromkeys(["native", "triton", "reference"], inverse.reference)


def test_gather_rows_leaves_padding_out_of_the_gradient():
    src = torch.ones(2, 1, requires_grad=True)
    out = gather_rows(src, torch.tensor([0, -1, 0]), torch.zeros(1))
    (grad,) = torch.autograd.grad(out, src, torch.tensor([[1.0], [torch.nan], [2.0]]))
    assert grad.tolist() == [[3.0], [0.0]]


@pytest.mark.parametrize("given", [False, True])
def test_gather_rows_compiles_without_a_graph_break(given):
    src, rows, fill = case("odd")

    def gather(src, rows, fill):
        map_ = invert_rows(rows, len(src)) if given else None
        return gather_rows(src, rows, fill, map_) * 2

    results = []
    for f in (gather, torch.compile(gather, fullgraph=True, backend="aot_eager")):
        out = f(src.requires_grad_(), rows, fill)
        results.append((out, *torch.autograd.grad(out, src, torch.ones_like(out))))
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(*results))


def test_use_backend_raises_where_the_named_backend_declines(monkeypatch):
    monkeypatch.setenv("PYRL_BACKEND", "triton")
    with pytest.raises(NotImplementedError, match="triton: src is on cpu, expected cuda"):
        gather_rows(*case("odd"))
    with use_backend("fast"), pytest.raises(NotImplementedError, match=r"\['native', 'triton'"):
        gather_rows(*case("odd"))


def test_use_backend_is_in_force_where_another_thread_takes_the_gradient():
    """As autograd does for tensors on a GPU."""
    src, rows, fill = case("odd")
    out = gather_rows(src.requires_grad_(), rows, fill)
    with ThreadPoolExecutor(1) as pool:
        with use_backend("fast"), pytest.raises(NotImplementedError, match=r"rows: no .*'fast' to"):
            pool.submit(out.sum().backward, retain_graph=True).result()
        pool.submit(out.sum().backward).result()
    assert src.grad is not None


def triton_equals_reference():
    for shape in set(SHAPES) - {"threads"}:
        for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64):
            src, rows, fill = case(shape, dtype)
            for strided in (src, torch.cat([src, src], dim=1)[:, : src.shape[1]]):
                for padding in (fill, None):
                    with use_backend("triton"):
                        out = gather_rows(strided, rows, padding)
                    with use_backend("reference"):
                        assert torch.equal(out, gather_rows(src, rows, padding)), (shape, dtype)
