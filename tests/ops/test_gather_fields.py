import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import gather_fields, use_backend
from pyrl_ext.ops.gather_fields import native, reference
from tests.helpers import emulated
from tests.helpers.threads import on_threads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]

KINDS = [  # dtype, what follows N, fill
    (torch.int64, (), -100),
    (torch.bool, (), 1),
    (torch.float32, (), -0.0),
    (torch.bfloat16, (5,), float("nan")),
    (torch.uint8, (23, 4), 255),
    (torch.uint16, (3,), 65535),
    (torch.float64, (2,), 0.1),
    (torch.float16, (8,), float("inf")),
    (torch.float32, (0,), 1),
    (torch.float8_e4m3fn, (3,), 1.5),
    (torch.bfloat16, (1100,), 2.5),
]


def case(N=50, M=300, kinds=KINDS, device="cpu"):
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(-1, N, (M,), generator=g)
    run = min(N, M) // 2  # as a layout has it: consecutive rows
    rows[:run] = torch.arange(run)
    fields = [torch.randint(0, 2, (N, *shape), generator=g).to(dtype) for dtype, shape, _ in kinds]
    return [f.to(device) for f in fields], rows.to(device), [float(fill) for *_, fill in kinds]


def equal_bits(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def words(tensor):
    """Indexing and joining know few of the dtypes, but all integers."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def gathered(fields, rows, fills):
    """By indexing, field after field."""
    for field, fill in zip(fields, fills):
        # cast on the host: a GPU writes NaN with other bits
        padding = torch.full((1, *field.shape[1:]), fill, dtype=torch.float64).to(field.dtype)
        joined = torch.cat([words(field), words(padding).to(field.device)])
        yield joined[rows].view(field.dtype)


def strided(field):
    """The same field, in memory that starts anywhere and has gaps."""
    data = words(field)
    if field.ndim == 1:
        return torch.stack([data, data], dim=1)[:, 1].view(field.dtype)
    return torch.cat([data[:, :1], data], dim=1)[:, 1 if data.shape[1] else 0 :].view(field.dtype)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("N", "M"), [(50, 300), (1, 1), (5, 0), (0, 4), (20_000, 40_000)])
def test_gather_fields_equals_indexing_field_after_field(backend, device, N, M):
    fields, rows, fills = case(N, M, KINDS[:-1] if N > 1000 else KINDS, device)
    if N == 0:
        rows = rows.fill_(-1)
    with use_backend(backend):
        out = gather_fields(fields, rows, fills)
    equal_bits(out.views, list(gathered(fields, rows, fills)))
    assert all(view.storage_offset() * view.element_size() % 256 == 0 for view in out.views)
    assert all(view.untyped_storage().data_ptr() == out.flat.data_ptr() for view in out.views)


@pytest.mark.parametrize(
    "run", [emulated.gather_fields, lambda *args: native.gather_fields(*args, pin=False)]
)
@pytest.mark.parametrize("repeats", [1, 3, 6])
def test_gather_fields_kernels_equal_the_reference(run, repeats):
    """Also of more fields than a launch takes, and of sources with gaps, that start anywhere."""
    fields, rows, fills = case(kinds=KINDS * repeats)
    expected = reference(fields, rows, fills, False)
    assert torch.equal(run(fields, rows, fills), expected)
    assert torch.equal(run([strided(field) for field in fields], rows, fills), expected)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(-1, 8), max_size=40),
    widths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    threads=st.sampled_from([1, 2, 5]),
)
def test_gather_fields_equals_a_python_loop(rows, widths, threads):
    dtypes = [torch.int16, torch.uint8, torch.float64]
    fields = [
        torch.arange(9 * width).to(dtypes[i % 3]).view(9, width) for i, width in enumerate(widths)
    ]
    with on_threads(threads):
        out = gather_fields(fields, torch.tensor(rows, dtype=torch.int64), range(len(fields)))
    for i, (field, view) in enumerate(zip(fields, out.views)):
        assert view.tolist() == [[i] * widths[i] if m < 0 else field[m].tolist() for m in rows]


@pytest.mark.parametrize("device", DEVICES)
def test_gather_fields_moves_all_fields_in_one_copy(device):
    fields, rows, fills = case()
    out = gather_fields(fields, rows, fills, pin=device == "cuda")
    moved = out.to(device, non_blocking=True)
    assert out.flat.is_pinned() == (device == "cuda") and moved.flat.device.type == device
    assert moved.views[3].untyped_storage().data_ptr() == moved.flat.data_ptr()
    equal_bits([view.cpu() for view in moved.views], out.views)


@needs_gpu
def test_gather_fields_captured_once_serves_other_rows():
    fields, rows, fills = case(device="cuda")
    graph = torch.cuda.CUDAGraph()
    gather_fields(fields, rows, fills)
    with torch.cuda.graph(graph):
        out = gather_fields(fields, rows, fills)
    rows.copy_(rows.flip(0))
    fields[0].add_(1)
    graph.replay()
    equal_bits(out.views, list(gathered(fields, rows, fills)))


def test_gather_fields_compiles_without_a_graph_break():
    fields, rows, fills = case(kinds=KINDS[:5])

    def gather(fields, rows):
        out = gather_fields(fields, rows, fills)
        return [view * 2 for view in out.views if view.dtype != torch.bool], out.flat

    compiled = torch.compile(gather, fullgraph=True, backend="aot_eager")
    got = compiled(fields, rows)
    expected = gather(fields, rows)
    equal_bits([*got[0], got[1]], [*expected[0], expected[1]])


def test_gather_fields_gives_shapes_of_meta_tensors():
    fields, rows, fills = case()
    out = gather_fields([field.to("meta") for field in fields], rows.to("meta"), fills)
    assert [view.shape for view in out.views] == [(300, *shape) for _, shape, _ in KINDS]


def triton_equals_reference():
    for sizes in ((50, 300), (3, 5000), (0, 0)):
        # of the widest field 300 rows are hundreds of tiles, and 5000 would take most of a minute
        for kinds in (KINDS[:-1] if sizes[1] > 300 else KINDS, KINDS[:1] * 35):
            fields, rows, fills = case(*sizes, kinds)
            with use_backend("triton"):
                out = gather_fields([strided(field) for field in fields], rows, fills)
            with use_backend("reference"):
                equal_bits(out.views, gather_fields(fields, rows, fills).views)
