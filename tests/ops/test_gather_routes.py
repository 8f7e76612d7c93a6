import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from pyrl_ext.ops import count_routes, gather_routes, use_backend
from pyrl_ext.ops._native import C
from pyrl_ext.ops.gather_routes import ROUTE_DTYPES, native, op, reference
from tests.helpers import emulated
from tests.helpers.threads import on_threads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KERNELS = ["avx512", "avx2", "portable", "emulated"]


def case(T=50, L=5, K=4, M=37, experts=64, dtype=torch.uint8, layers=(3, 0, 4)):
    g = torch.Generator().manual_seed(0)
    routes = torch.randint(0, experts, (T, L, K), generator=g).to(dtype)
    rows = torch.randint(-1, T, (M,), generator=g)
    return routes, rows, layers, experts


def run(kernel, routes, rows, layers, experts, out=None):
    """One of KERNELS, into ``out`` if it is given."""
    if kernel == "emulated":
        return emulated.gather_routes(routes, rows, layers, experts, out)
    if not C.has_isa(kernel):
        pytest.skip(f"this processor has no {kernel}")
    if out is None:
        out = routes.new_empty(len(layers), len(rows), routes.shape[2])
    args = native.arguments(routes, rows, layers, experts, out)
    C.gather_routes_cpu(args=args, isa=kernel, threads=torch.get_num_threads())
    return out


def same(out, *args):
    expected = reference(*args)
    return out.dtype == expected.dtype and torch.equal(out.long(), expected.long())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ROUTE_DTYPES, ids=str)
def test_gather_routes_kernels_equal_the_reference(kernel, dtype):
    for K in (1, 2, 3, 4, 6, 8, 9, 16, 300):
        for M, layers in [(0, [1]), (1, [4, 3]), (63, []), (200, [0, 1, 2, 3, 4, 6, 5, 5, 1, 2])]:
            routes, rows, _, experts = case(L=7, K=K, M=M, dtype=dtype, experts=max(K, 100))
            args = (routes, rows, torch.tensor(layers, dtype=torch.int64), experts)
            assert same(run(kernel, *args), *args), (K, M, layers)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("K", [4, 6, 8])
def test_gather_routes_takes_more_layers_than_one_launch_holds(kernel, K):
    routes, rows, _, experts = case(L=600, K=K, M=130)
    layers = torch.cat([torch.arange(580), torch.tensor([599, 3, 3]), torch.arange(20, 90)])
    args = (routes, rows, layers, experts)
    assert same(run(kernel, *args), *args)


@pytest.mark.parametrize("kernel", ["portable", "emulated"])
def test_gather_routes_reads_and_writes_whole_words_of_layers_and_tokens(kernel):
    """Tuples of 4 and 8 bytes of layers side by side, from rows at any multiple of a tuple; a last
    tile that is not full, more layers than a tile holds."""
    for dtype, K in [(torch.uint8, 4), (torch.uint8, 8), (torch.uint16, 2), (torch.uint16, 4)]:
        for L, layers, M in [(47, range(1, 47), 132), (89, range(89), 206), (3, range(1, 2), 64)]:
            routes, rows, _, experts = case(T=70, L=L, K=K, M=M, dtype=dtype, experts=200)
            rows[:5], rows[-1] = torch.tensor([69, 0, -1, 69, 0]), 69
            index = torch.tensor(list(layers))
            out = torch.zeros(len(index), M, K).to(dtype)
            for offset in (0, K):  # of the first row from a multiple of 16 bytes
                moved = torch.cat([routes.new_zeros(offset), routes.flatten()])[offset:]
                args = (moved.view_as(routes), rows, index, experts)
                assert same(run(kernel, *args, out), *args), (dtype, K, L, offset)
                part = (moved.view_as(routes)[1:-1], rows.clamp(max=67), index, experts)
                assert same(run(kernel, *part, out), *part), (dtype, K, L, offset)


@settings(max_examples=200, deadline=None)
@given(
    tuples=st.sampled_from([(torch.uint8, K) for K in (3, 4, 7, 8)])
    | st.sampled_from([(torch.uint16, K) for K in (2, 3, 4)]),
    slots=st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 40)),
    M=st.integers(0, 200),
    offsets=st.tuples(st.integers(0, 16), st.integers(0, 16)),
    experts=st.integers(8, 256),
)
def test_gather_routes_on_a_gpu_begins_layers_anywhere(tuples, slots, M, offsets, experts):
    """The grid walked on the host: any number of rows, so that layers of ``out`` begin at any part
    of 16 bytes; routes and ``out`` begin anywhere, too, and nothing beside ``out`` is written."""
    (dtype, K), (L, first, count), (read, written) = tuples, slots, offsets
    routes, rows, _, _ = case(L=L, K=K, M=M, dtype=dtype, experts=experts)
    index = torch.arange(min(first, L - 1), L)[:count]
    moved = torch.cat([routes.new_zeros(read), routes.flatten()])[read:].view_as(routes)
    room = torch.full((written + index.numel() * M * K + 16,), 201).to(dtype)
    inside = room[written:-16].view(len(index), M, K)
    run("emulated", moved, rows, index, experts, inside)
    assert same(inside, routes, rows, index, experts)
    assert (room[:written] == 201).all() and (room[-16:] == 201).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_gather_routes_takes_memory_that_starts_anywhere(kernel):
    """Neither routes nor out begin at a multiple of a word, a line or a row."""
    for dtype, K, offset in [(torch.uint8, 4, 1), (torch.uint8, 8, 6), (torch.uint16, 4, 5)]:
        routes, rows, _, experts = case(L=9, K=K, M=150, dtype=dtype)
        moved = torch.cat([routes.new_zeros(offset), routes.flatten()])[offset:].view_as(routes)
        layers = torch.arange(1, 9)
        room = torch.full((offset + 8 * 150 * K + 3,), 201).to(dtype)
        before = room.clone()
        run(kernel, moved, rows, layers, experts, room[offset:-3].view(8, 150, K))
        assert same(room[offset:-3].view(8, 150, K), routes, rows, layers, experts), (dtype, K)
        assert torch.equal(room[:offset], before[:offset])
        assert torch.equal(room[-3:], before[-3:])


@pytest.mark.parametrize("kernel", KERNELS)
def test_gather_routes_reads_rows_apart_in_memory_in_place(kernel):
    routes, rows, _, experts = case(L=12, K=4, M=90)
    layers = torch.tensor([0, 1, 2, 3, 4, 6])
    for view in (routes[:, 3:10], routes[::2].repeat(2, 1, 1)[:50], routes[:1].expand(50, -1, -1)):
        assert native.rows_apart(view)
        args = (view, rows, layers, experts)
        assert same(run(kernel, *args), *args)


def test_gather_routes_copies_other_strides():
    routes, rows, _, experts = case(L=4, K=4)
    for view in (routes.transpose(1, 2), routes.flip(0)[:, ::2], routes[..., ::2]):
        slots = torch.tensor([1, 0])
        out = native.gather_routes(view, rows, slots, experts)
        assert same(out, view, rows, slots, experts)


@pytest.mark.parametrize("kernel", KERNELS[:3])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_gather_routes_streams_large_outputs(kernel, threads):
    routes, rows, _, experts = case(T=3000, L=46, M=6_001)  # 1.1 MB
    args = (routes, rows, torch.arange(46), experts)
    with on_threads(threads):
        assert same(run(kernel, *args), *args)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gather_routes_reads_beyond_2_31_bytes(kernel):
    """The pages that nobody writes take no memory."""
    T = (5 << 29) // 188
    routes = torch.from_numpy(np.zeros((T, 47, 4), dtype=np.uint8))
    rows = torch.tensor([0, T - 1, -1, T // 2])
    routes[T - 1], routes[T // 2] = 7, 9
    out = run(kernel, routes, rows, torch.tensor([46, 0]), 64)
    assert out[:, :, 0].tolist() == [[0, 7, 8, 9]] * 2


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 6), max_size=20),
    layers=st.lists(st.integers(0, 2), max_size=5),
    K=st.integers(1, 5),
    spare=st.integers(0, 4),
    kernel=st.sampled_from(["native", "reference", "emulated"]),
)
def test_gather_routes_equals_a_python_loop(rows, layers, K, spare, kernel):
    experts = K + spare
    routes = torch.arange(7 * 3 * K).view(7, 3, K).remainder(experts).to(torch.uint8)
    index = torch.tensor(rows, dtype=torch.int64)
    if kernel == "emulated":
        slots = torch.tensor(layers, dtype=torch.int64)
        out = run(kernel, routes, index, slots, experts)
    else:
        with use_backend(kernel):
            out = gather_routes(routes, index, layers, experts)
    assert out.shape == (len(layers), len(rows), K) and out.dtype == torch.uint8
    for i, layer in enumerate(layers):
        for m, row in enumerate(rows):
            padding = [(m * K + j) % experts for j in range(K)]
            expected = padding if row < 0 else routes[row, layer].tolist()
            assert out[i, m].tolist() == expected


@pytest.mark.parametrize(("K", "experts"), [(4, 4), (4, 64), (6, 7), (8, 160)])
def test_gather_routes_pads_with_distinct_experts_spread_over_all(K, experts):
    rows = torch.full((experts * 3,), -1)
    out = gather_routes(torch.zeros(0, 1, K, dtype=torch.uint8), rows, [0], experts)[0]
    assert all(len(set(row)) == K for row in out.tolist())
    assert torch.bincount(out.flatten().int(), minlength=experts).tolist() == [3 * K] * experts


@pytest.mark.parametrize("kernel", KERNELS)
def test_gather_routes_keeps_every_expert_id(kernel):
    for dtype, experts in [(torch.uint8, 256), (torch.uint16, 1 << 16)]:
        routes = torch.arange(experts).to(dtype).view(-1, 1, 1)
        out = run(kernel, routes, torch.arange(experts), torch.tensor([0]), experts)
        assert torch.equal(out.flatten().int(), torch.arange(experts).int())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("experts", [257, 384, 1 << 16])
@pytest.mark.parametrize("K", [1, 8, 300])
def test_gather_routes_pads_with_more_than_256_experts(kernel, experts, K):
    routes, rows, layers, _ = case(K=K, M=300, dtype=torch.uint16, experts=experts)
    args = (routes, rows, torch.tensor(layers), max(experts, K))
    assert same(run(kernel, *args), *args)


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
@pytest.mark.parametrize("dtype", ROUTE_DTYPES, ids=str)
def test_gather_routes_on_a_gpu_equals_the_reference(backend, dtype):
    for K, M in [(1, 5), (4, 3000), (6, 200), (8, 3000), (9, 65)]:
        routes, rows, _, experts = case(L=46, K=K, M=M, dtype=dtype)
        layers = torch.arange(3, 46)
        with use_backend(backend):
            out = gather_routes(routes.cuda(), rows.cuda(), layers, experts)
        assert out.is_cuda and same(out.cpu(), routes, rows, layers, experts), (K, M)


@needs_gpu
def test_gather_routes_in_a_cuda_graph_reads_new_lengths():
    """Rows padded to a capacity: what is captured once serves every batch."""
    routes, rows, layers, experts = case(M=512)
    static_routes = routes.cuda()
    static_rows = rows.cuda()
    gather_routes(static_routes, static_rows, layers, experts)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), use_backend("native"):
        out = gather_routes(static_routes, static_rows, layers, experts)
    for length in (512, 100, 0):
        rows = torch.cat([torch.randint(50, (length,)), torch.full((512 - length,), -1)])
        routes = routes.flip(0)
        static_routes.copy_(routes)
        static_rows.copy_(rows)
        graph.replay()
        assert same(out.cpu(), routes, rows, torch.tensor(layers), experts), length


@needs_gpu
def test_gather_routes_declines_more_than_a_launch_can_carry():
    routes = torch.zeros(2, (1 << 15) + 1, 1, dtype=torch.uint16, device="cuda")
    rows = torch.zeros(1, dtype=torch.int64, device="cuda")
    with use_backend("native"):
        with pytest.raises(NotImplementedError, match="a slot is 32768, expected below 32768"):
            gather_routes(routes, rows, [1 << 15], 4)
        with pytest.raises(NotImplementedError, match="take 65538 bytes, expected at most 16384"):
            gather_routes(routes.transpose(1, 2), rows, [0], 1 << 16)
        with pytest.raises(IndexError, match=r"layers\[0\] is 9, expected a slot of routes in"):
            gather_routes(routes[:, :9], rows, [9], 4)


def triton_equals_reference():
    (triton,) = (backend for backend in op.backends if backend.name == "triton")
    for dtype in ROUTE_DTYPES:
        for K, M in [(1, 3), (4, 300), (6, 0), (6, 171), (8, 70)]:
            experts = 64 if dtype == torch.uint8 else 384
            routes, rows, layers, experts = case(L=7, K=K, M=M, dtype=dtype, experts=experts)
            args = (routes[:, 1:6], rows, torch.tensor(layers), experts)
            assert triton.refuse(*args) is None
            assert same(triton.run(*args), *args), (dtype, K, M)


def test_gather_routes_refuses_routes_of_another_device():
    """A kernel that read pinned memory would do so after the call, when it may be used again."""
    routes = torch.zeros(3, 2, 1, dtype=torch.uint8)
    rows = torch.zeros(4, dtype=torch.int64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="routes is on cpu, rows on cuda:0, expected one dev"):
            gather_routes(routes, torch.empty(4, dtype=torch.int64, device="cuda"), [0], 2)
        with pytest.raises(ValueError, match="rows on cpu, expected one device"):
            there = torch.empty(3, 2, 1, dtype=torch.uint8, device="cuda")
            gather_routes(there, rows, [0], 2)


def test_gather_routes_gives_shapes_of_meta_tensors():
    routes, rows, layers, experts = case()
    out = gather_routes(routes.to("meta"), rows.to("meta"), layers, experts)
    assert out.is_meta and out.shape == (3, 37, 4) and out.dtype == torch.uint8


def test_count_routes_counts_what_is_gathered():
    """Padding rows too; an expert that nobody chose has 0."""
    routes = torch.rand(30, 3, 9).topk(2).indices.to(torch.uint8)
    rows = torch.tensor([4, -1, 29, 4, -1, 0])
    counts = count_routes(routes, rows, 11)
    for layer, taken in enumerate(gather_routes(routes, rows, range(3), 11)):
        assert counts[layer].tolist() == [int((taken == expert).sum()) for expert in range(11)]
    assert count_routes(routes[:0], rows[:0], 11).tolist() == [[0] * 11] * 3
