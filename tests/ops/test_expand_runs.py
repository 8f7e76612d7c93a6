import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import expand_runs, use_backend
from pyrl_ext.ops._native import C
from pyrl_ext.ops.expand_runs import native, op, reference
from tests.helpers.threads import on_threads

ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(not C.has_isa(isa), reason=f"no {isa} here"))
    for isa in ("avx512", "avx2", "portable")
]
RUNS = st.lists(st.tuples(st.integers(-2, 2**40), st.integers(0, 25)), max_size=20)


def table(runs):
    starts, lengths = zip(*runs, strict=True) if runs else ((), ())
    return torch.tensor(starts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)


def loop(runs, size):
    out = [s + i if s >= 0 else -1 for s, n in runs for i in range(n)]
    return out + [-1] * (size - len(out))


@settings(max_examples=200, deadline=None)
@given(RUNS, st.integers(0, 40))
def test_expand_runs_equals_a_python_loop(runs, spare):
    size = sum(n for _, n in runs) + spare
    for backend in ("native", "reference"):
        with use_backend(backend):
            assert expand_runs(*table(runs), size).tolist() == loop(runs, size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("longest", [0, 3, 40, 60_000])
def test_expand_runs_native_equals_reference(isa, threads, longest):
    """Parts of different threads begin and end inside runs; nothing past the end is written."""
    g = torch.Generator().manual_seed(longest)
    count = 400_000 // (longest + 20)
    lengths = torch.randint(0, longest + 1, (count,), generator=g)
    starts = torch.randint(-1, 2**33, (count,), generator=g)
    starts[::5] = -1
    with on_threads(threads):
        for spare in (0, 1, 100_001):
            size = int(lengths.sum()) + spare
            wanted = reference(starts, lengths, size)
            assert torch.equal(native(starts, lengths, size, isa), wanted)


@pytest.mark.parametrize("isa", ISAS)
def test_expand_runs_writes_only_its_part_of_memory(isa):
    starts, lengths = table([(5, 3), (-1, 2), (100, 9), (7, 0), (1, 1)])
    for size in range(15, 40):
        memory = torch.full((size + 32,), -77)
        for offset in (8, 9, 11):
            C.expand_runs_cpu(
                starts=starts.data_ptr(),
                lengths=lengths.data_ptr(),
                num_runs=5,
                out=memory[offset:].data_ptr(),
                size=size,
                isa=isa,
                threads=1,
            )
            written = memory[offset : offset + size]
            assert torch.equal(written, reference(starts, lengths, size))
            assert (memory[:offset] == -77).all() and (memory[offset + size :] == -77).all()
            memory.fill_(-77)


def test_expand_runs_takes_tables_with_strides():
    columns = torch.tensor([[3, 2], [-1, 1], [10, 4]])
    assert expand_runs(columns[:, 0], columns[:, 1], 8).tolist() == [3, 4, -1, 10, 11, 12, 13, -1]


def test_expand_runs_names_every_backend_that_declines():
    table = torch.empty(3, dtype=torch.int64, device="meta")
    for backend in op.backends:
        reason = backend.refuse(table, table, 5)
        assert reason == "starts is on meta, expected cpu; copy what it returns", backend.name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_expand_runs_declines_a_gpu_by_name():
    table = torch.zeros(3, dtype=torch.int64, device="cuda")
    with pytest.raises(NotImplementedError, match="starts is on cuda:0, expected cpu"):
        expand_runs(table, table, 5)
