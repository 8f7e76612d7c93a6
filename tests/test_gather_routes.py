import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import gather_routes, use_backend
from pyrl_ext.ops.gather_routes import ROUTE_DTYPES, native, op, reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def case(T=50, L=5, K=4, M=37, experts=64, dtype=torch.uint8, layers=(3, 0, 4)):
    g = torch.Generator().manual_seed(0)
    routes = torch.randint(0, experts, (T, L, K), generator=g).to(dtype)
    rows = torch.randint(-1, T, (M,), generator=g)
    return routes, rows, layers, experts


@pytest.mark.parametrize("dtype", ROUTE_DTYPES, ids=str)
@pytest.mark.parametrize("to", ["int32", "int64", "same"])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 6, 8, 9])
def test_native_equals_reference(dtype, to, K):
    routes, rows, layers, experts = case(K=K, M=3000, dtype=dtype)
    out_dtype = dtype if to == "same" else getattr(torch, to)
    args = (routes, rows, torch.tensor(layers), experts, out_dtype)
    assert native.refuse(*args) is None
    out = native.gather_routes(*args)
    assert out.dtype == out_dtype and out.is_contiguous()
    assert torch.equal(out.long(), reference.gather_routes(*args).long())


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 6), max_size=20),
    layers=st.lists(st.integers(0, 2), max_size=5),
    K=st.integers(1, 5),
    spare=st.integers(0, 4),
    backend=st.sampled_from(["native", "reference"]),
)
def test_equals_a_python_loop(rows, layers, K, spare, backend):
    experts = K + spare
    routes = torch.arange(7 * 3 * K).view(7, 3, K).remainder(experts).to(torch.uint8)
    with use_backend(backend):
        out = gather_routes(routes, torch.tensor(rows, dtype=torch.int64), layers, experts)
    assert out.shape == (len(layers), len(rows), K) and out.dtype == torch.int32
    for i, layer in enumerate(layers):
        for m, row in enumerate(rows):
            padding = [(m * K + j) % experts for j in range(K)]
            expected = padding if row < 0 else routes[row, layer].tolist()
            assert out[i, m].tolist() == expected


@pytest.mark.parametrize(("K", "experts"), [(4, 4), (4, 64), (6, 7), (8, 160)])
def test_padding_rows_are_distinct_and_spread(K, experts):
    rows = torch.full((experts * 3,), -1)
    out = gather_routes(torch.zeros(0, 1, K, dtype=torch.uint8), rows, [0], experts)[0]
    assert all(len(set(row)) == K for row in out.tolist())
    assert torch.bincount(out.flatten(), minlength=experts).tolist() == [3 * K] * experts


def test_every_expert_number_survives_the_widening():
    for dtype, experts in [(torch.uint8, 256), (torch.uint16, 1 << 16), (torch.int16, 1 << 15)]:
        routes = torch.arange(experts).to(dtype).view(-1, 1, 1)
        out = gather_routes(routes, torch.arange(experts), [0], experts)
        assert torch.equal(out.flatten(), torch.arange(experts, dtype=torch.int32))


@needs_gpu
def test_runs_on_a_gpu():
    routes, rows, layers, experts = case()
    out = gather_routes(routes.cuda(), rows.cuda(), layers, experts)
    assert out.is_cuda and torch.equal(out.cpu(), gather_routes(routes, rows, layers, experts))


def test_opcheck():
    routes, rows, layers, experts = case()
    torch.library.opcheck(op.overload, (routes, rows, torch.tensor(layers), experts, torch.int32))


def test_compiles_without_a_graph_break():
    routes, rows, layers, experts = case()
    compiled = torch.compile(
        lambda a, b: gather_routes(a, b, layers, experts) + 1, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(routes, rows), gather_routes(routes, rows, layers, experts) + 1)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_out_of_range_names_the_entry(backend):
    routes, rows, _, experts = case()
    rows[5] = 50
    with use_backend(backend):
        with pytest.raises(IndexError) as error:
            gather_routes(routes, rows, [0], experts)
        assert str(error.value) == (
            "gather_routes: rows[5] is 50, expected -1 (padding) or a token of routes in [0, 50)"
        )
        with pytest.raises(IndexError) as error:
            gather_routes(routes, rows.clamp(max=49), [0, 5], experts)
        assert str(error.value) == (
            "gather_routes: layers[1] is 5, expected a slot of routes in [0, 5)"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(experts=3), "num_experts is 3, expected 4"),
        (dict(experts=300), "num_experts is 300, expected 4 (the experts of a token"),
        (dict(dtype=torch.int64), "routes is torch.int64, expected one of"),
        (dict(to=torch.int16), "out_dtype is torch.int16, expected torch.int32"),
        (dict(layers=torch.tensor([[0]])), "layers is torch.int64 [1, 1]"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    change = dict(change)
    to = change.pop("to", torch.uint8 if "experts" in change else torch.int32)
    routes, rows, layers, _ = case(**{k: v for k, v in change.items() if k != "experts"})
    experts = change.get("experts", 64)
    with pytest.raises((ValueError, TypeError)) as error:
        gather_routes(routes, rows, layers, experts, to)
    assert message in str(error.value)
