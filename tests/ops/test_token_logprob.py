"""The local halves of the log-prob: accuracy against float64 and the cases that make NaN."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import (
    token_logprob_combine,
    token_logprob_grad,
    token_logprob_grad_,
    token_logprob_rows,
    token_logprob_stats,
    use_backend,
)
from pyrl_ext.ops._native import C
from pyrl_ext.ops.token_logprob import native, over_op, reference
from tests.helpers import emulated
from tests.helpers.threads import on_threads

INF = torch.inf
ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(not C.has_isa(isa), reason=f"no {isa} here"))
    for isa in ("avx512", "avx2", "portable")
] + ["emulated"]  # the grids of the CUDA kernels, on the host
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stats_on(isa, *args, **options):
    """The statistics by one instruction set, or by the emulated CUDA kernel."""
    if isa == "emulated":
        return emulated.token_logprob_stats(*args, **options)
    return native.stats(*args, **options, isa=isa)


def grad_on(isa, *args, **options):
    if isa == "emulated":
        return emulated.token_logprob_grad(*args, **options)
    return native.grad(*args, **options, isa=isa)


def case(T=9, V=5003, dtype=torch.float32, spread=4.0, offset=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(T, V, generator=g) + offset).to(dtype)
    targets = torch.randint(0, V, (T,), generator=g)
    scale = 0.5 + torch.rand(T, generator=g)
    return logits, targets, scale


def rows_of(logits, scale, width, seed=1):
    """Exact max, log-sum and entropy of the rows, and two gradients, in float64."""
    x = logits[:, :width].double()
    top = x.amax(-1)
    log_p = ((x - top[:, None]) * scale.double()[:, None]).log_softmax(-1)
    log_sum = ((x - top[:, None]) * scale.double()[:, None]).logsumexp(-1)
    entropy = -(log_p.exp() * log_p).nan_to_num().sum(-1)
    g = torch.Generator().manual_seed(seed)
    grads = torch.randn(2, len(x), generator=g, dtype=torch.float64)
    return top, log_sum, entropy, *grads


def relative(value, exact):
    """Largest error, relative above 1."""
    return ((value - exact) / exact.abs().clamp(min=1)).abs().max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 7, 31, 64, 2048, 2049, 5003])
def test_token_logprob_stats_equal_float64(isa, dtype, V):
    logits, targets, scale = case(V=V, dtype=dtype)
    for first, width in [(0, V), (0, max(V - 3, 0)), (-5, V), (V, V)]:
        exact = reference.stats(logits.double(), targets, scale.double(), first, width)
        ours = stats_on(isa, logits, targets, scale, first, width)
        peer = reference.stats(logits, targets, scale, first, width)
        assert torch.equal(ours[[0, 3]], exact[[0, 3]].float())
        error, peer_error = (relative(s[1:3], exact[1:3]) for s in (ours, peer))
        assert error <= 2 * peer_error + 2e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 7, 31, 64, 2048, 2049, 5003])
def test_token_logprob_grad_equals_float64(isa, dtype, V):
    logits, targets, scale = case(V=V, dtype=dtype)
    width = max(V - 3, 1)
    rows = rows_of(logits, scale, width)
    narrow = [row.float() for row in rows]
    exact = reference.grad(logits.double(), targets, scale.double(), 0, width, *rows)  # type: ignore[arg-type]
    ours = grad_on(isa, logits, targets, scale, 0, width, *narrow)
    peer = reference.grad(logits, targets, scale, 0, width, *narrow)  # type: ignore[arg-type]
    assert ours.dtype == dtype and torch.equal(ours[:, width:], torch.zeros_like(ours[:, width:]))
    error, peer_error = ((g.double() - exact).abs().max() for g in (ours, peer))
    assert error <= 2 * peer_error + 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_token_logprob_reads_and_writes_every_16_bit_number_as_torch(isa, dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    columns = every[:, None].contiguous()  # one valid column: the target logit is the column
    tokens = len(every)
    targets = torch.zeros(tokens, dtype=torch.int64)
    stats = stats_on(isa, columns, targets, torch.ones(tokens), 0, 1)
    assert torch.equal(stats[3].nan_to_num(7.25), every.float().nan_to_num(7.25))

    # A gradient that is any float: two columns with p = 1/2 and a gradient of -2 * value.
    g = torch.Generator().manual_seed(0)
    values = torch.randint(-(1 << 31), 1 << 31, (20_000,), generator=g, dtype=torch.int64)
    values = values.to(torch.int32).view(torch.float32)
    values = torch.cat([values, torch.logspace(-9, 5, 4000), -torch.logspace(-9, 5, 4000)])
    values = values[values.isfinite() & (values.abs() < 1e38) & (values.abs() > 1e-37)]
    T = len(values)
    half = torch.full((T,), 2.0).log()
    out = grad_on(
        isa,
        torch.zeros(T, 2, dtype=dtype),
        torch.full((T,), 5),
        torch.ones(T),
        0,
        2,
        torch.zeros(T),
        half,
        half,
        -2 * values,
        torch.zeros(T),
    )
    wanted = values.to(dtype)
    step = (out[:, 0].view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert step.max() <= 1 and (step > 0).float().mean() < 1e-3  # p is 1/2 to 1e-7


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprob_makes_no_nan_of_infinities(backend, dtype):
    V = 5000
    rows = {
        "leading block": torch.full((V,), -INF).index_fill(0, torch.arange(4000, V), 1.0),
        "nothing at all": torch.full((V,), -INF),
        "one": torch.full((V,), -INF).index_fill(0, torch.tensor([3]), -1e4),
        "one hot": torch.full((V,), -1e4).index_fill(0, torch.tensor([3]), 1e4),
        "far below zero": torch.full((V,), -1e4),
    }
    logits = torch.stack(list(rows.values())).to(dtype)
    targets = torch.full((len(rows),), 3)
    scale = torch.ones(len(rows))
    with use_backend(backend):
        top, total, weighted, _ = token_logprob_stats(logits, targets, scale, 0, V)
    n = [1000.0, 0.0, 1.0, 1.0, V]
    torch.testing.assert_close(total, torch.tensor(n))
    torch.testing.assert_close(weighted, torch.zeros(len(rows)))
    assert top[1] == -INF
    with use_backend(backend):
        grad = token_logprob_grad(
            logits,
            targets,
            scale,
            0,
            V,
            top,
            total.log(),
            total.log().clamp(min=0),
            torch.ones(len(rows)),
            torch.ones(len(rows)),
        )
    assert grad.isfinite().all()
    assert torch.equal(grad[1:4].count_nonzero(1), torch.zeros(3, dtype=torch.int64))
    assert grad[0, :3].count_nonzero() == 0 and grad[0, 3] == 1 and grad[0, 4000] < 0


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("poison", [torch.nan, INF])
@pytest.mark.parametrize("where", [0, 2047, 4999, slice(None)], ids=str)
def test_token_logprob_keeps_nan_and_inf_in_their_row(backend, poison, where):
    logits, targets, scale = case(T=3, V=5000)
    logits[1, where] = poison
    with use_backend(backend):
        stats = token_logprob_stats(logits, targets, scale, 0, 5000)
    assert stats[1].isnan().tolist() == [False, True, False]


def test_token_logprob_grad_reads_no_row_without_gradient():
    logits, targets, scale = case(T=3, V=100)
    rows = [row.float() for row in rows_of(logits, scale, 100)]
    rows[3][1] = rows[4][1] = 0
    logits[1] = torch.nan
    for backend in ("native", "reference"):
        with use_backend(backend):
            grad = token_logprob_grad(logits, targets, scale, 0, 100, *rows)
        assert grad[1].count_nonzero() == 0 and grad[0].count_nonzero() == 100


def test_token_logprob_stats_show_a_nan_of_any_payload():
    bits = torch.tensor([[0x7F800000 | 0x1FF, 0]], dtype=torch.int32)
    logits = bits.view(torch.float32)
    for isa in ("avx512", "avx2", "portable"):
        if C.has_isa(isa):
            zero = torch.zeros(1, dtype=torch.int64)
            one = torch.ones(1)
            assert stats_on(isa, logits, zero, one, 0, 2)[1].isnan()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", range(5))
def test_token_logprob_grad_shows_a_nan_of_any_payload(isa, dtype, where):
    logits, targets, scale = case(T=2, V=70, dtype=dtype)
    rows = [row.float() for row in rows_of(logits, scale, 70)]
    rows[where][1] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    grad = grad_on(isa, logits, targets, scale, 0, 70, *rows)
    assert grad.isnan().all(1).tolist() == [False, True]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_token_logprob_has_the_same_bits_for_any_threads(threads):
    args = (*case(T=37, V=3000, dtype=torch.bfloat16), 0, 3000)
    one = native.stats(*args)
    with on_threads(threads):
        assert torch.equal(native.stats(*args), one)


def test_token_logprob_native_declines_float64():
    logits, targets, scale = case(V=10)
    with use_backend("native"), pytest.raises(NotImplementedError, match=r"torch\.float64"):
        token_logprob_stats(logits.double(), targets, scale.double(), 0, 10)


def ranges(V=5000, dtype=torch.float32):
    """Rows of any range, and which of their columns are kept."""
    g = torch.Generator().manual_seed(5)
    normal = torch.randn(V, generator=g)
    rows = {
        "far below": normal - 1e4,
        "far above": normal + 1e4,
        "leading block": normal.clone().index_fill_(0, torch.arange(V * 4 // 5), -INF),
        "one hot": torch.full((V,), -1e4).index_fill_(0, torch.tensor([V - 1]), 1e4),
        "equal": torch.full((V,), 3.0),
        "rising": torch.linspace(-300, 300, V),
        "steep": 2e3 * normal,
        "every second": torch.where(torch.arange(V) % 2 == 0, -INF, normal),
    }
    logits = torch.stack(list(rows.values())).to(dtype)
    keep = torch.rand(logits.shape, generator=g) < 0.3
    keep[:, V - 1] = True
    targets = torch.full((len(rows),), V - 1)
    return logits, targets, 0.5 + torch.rand(len(rows), generator=g), keep


def values(stats, scale):
    """Log-prob and entropy of one shard's statistics."""
    top, total, weighted, target = stats
    return torch.stack([(target - top) * scale - total.log(), total.log() - weighted / total])


def check_ranges(stats, grad, dtype, device="cpu"):
    """``stats`` and ``grad`` of a backend against float64, with a mask and without."""
    *args, keep = (t.to(device) for t in ranges(dtype=dtype))
    logits, targets, scale = args
    V = logits.shape[1]
    for mask in (None, keep):
        wide = logits.double(), targets, scale.double(), 0, V
        exact = values(reference.stats(*wide, mask), scale.double())
        ours = stats(*args, 0, V, mask)
        assert relative(values(ours, scale), exact) <= 2e-5
        kept = logits if mask is None else logits.masked_fill(~mask, -INF)
        rows = [row.to(device) for row in rows_of(kept.cpu(), scale.cpu(), V)]
        wanted = reference.grad(*wide, *rows, keep_mask=mask)
        given = grad(*args, 0, V, *(row.float() for row in rows), mask)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(given.double(), wanted, rtol=step, atol=2e-5)
        if mask is not None:
            assert given[~mask].count_nonzero() == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprob_takes_rows_of_any_range_and_masks(isa, dtype):
    check_ranges(
        lambda *args: stats_on(isa, *args),
        lambda *args: grad_on(isa, *args),
        dtype,
    )


def test_token_logprob_takes_a_target_that_is_not_kept():
    logits, targets, scale = case(T=4, V=70)
    keep = torch.ones(4, 70, dtype=torch.bool)
    keep[1, targets[1]] = keep[2] = False
    args = (logits, targets, scale, 0, 70)
    for backend in ("native", "reference"):
        with use_backend(backend):
            stats = token_logprob_stats(*args, keep)
            rows = [row.float() for row in rows_of(logits.masked_fill(~keep, -INF), scale, 70)]
            rows[0][2] = -INF
            grad = token_logprob_grad(*args, *rows, keep_mask=keep)
        assert stats[3, 1] == stats[3, 2] == -INF and stats[:, 2].tolist() == [-INF, 0, 0, -INF]
        assert grad[1, targets[1]] == 0 and grad[1].count_nonzero() == 69
        assert grad[2].count_nonzero() == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_logprob_takes_memory_that_starts_anywhere(isa, dtype):
    T = 3
    V = 301
    logits, targets, scale = case(T, V, dtype)
    keep = torch.rand(T, V) < 0.7
    rows = [row.float() for row in rows_of(logits.masked_fill(~keep, -INF), scale, V)]
    args = (targets, scale, 0, V)
    wanted = grad_on(isa, logits, *args, *rows, keep_mask=keep)
    for offset in (0, 1, 3, 8):
        view = torch.empty(offset + T * V, dtype=dtype)[offset:].view(T, V).copy_(logits)
        mask = torch.ones(offset + T * V, dtype=torch.bool)[offset:].view(T, V).copy_(keep)
        stats = stats_on(isa, view, *args, mask)
        torch.testing.assert_close(stats, reference.stats(logits, *args, keep))
        assert torch.equal(grad_on(isa, view, *args, *rows, keep_mask=mask), wanted)
        assert torch.equal(grad_on(isa, view, *args, *rows, keep_mask=mask, out=view), wanted)


def test_token_logprob_has_the_same_bits_alone_and_in_a_batch():
    args = case(T=3, V=70_400, dtype=torch.bfloat16)
    together = stats_on("emulated", *args, 0, 70_001)
    torch.testing.assert_close(together, reference.stats(*args, 0, 70_001))
    for t in range(3):
        logits, targets, scale = (a[t : t + 1] for a in args)
        alone = stats_on("emulated", logits, targets, scale, 0, 70_001)
        assert torch.equal(alone[:, 0], together[:, t])


@pytest.mark.parametrize("isa", ["auto", "emulated"])
def test_token_logprob_takes_more_than_2_31_elements(isa):
    columns = (1 << 31) + 8
    width = 40
    memory = mmap.mmap(-1, 4 * columns, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    logits = torch.frombuffer(memory, dtype=torch.bfloat16).view(2, columns)  # pages on demand
    logits[1, :width] = torch.arange(width)
    targets = torch.tensor([0, 7])
    scale = torch.ones(2)
    stats = stats_on(isa, logits, targets, scale, 0, width)
    assert stats[0].tolist() == [0, 39] and stats[3].tolist() == [0, 7]


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(0, 4),
    V=st.integers(0, 70),
    cut=st.integers(0, 70),
    first=st.integers(-3, 40),
    isa=st.sampled_from(["auto", "portable", "emulated"]),
    masked=st.booleans(),
)
def test_token_logprob_equals_a_python_loop(T, V, cut, first, isa, masked):
    logits = case(T, 71)[0][:, :V].contiguous()
    scale = torch.rand(T) + 0.5
    width = max(V - cut, 0)
    targets = torch.arange(T) * 9
    keep = torch.rand(T, V) < 0.6 if masked else None
    ours = stats_on(isa, logits, targets, scale, first, width, keep)
    for t in range(T):
        x = [
            -INF if keep is not None and not keep[t, c] else logits[t, c].item()
            for c in range(width)
        ]
        top = max(x, default=-INF)
        c = int(targets[t]) - first
        d = torch.tensor([(v - top) * scale[t].item() for v in x if v > -INF], dtype=torch.float64)
        row = [top, d.exp().sum(), (d.exp() * d).sum(), x[c] if 0 <= c < width else 0]
        torch.testing.assert_close(ours[:, t], torch.tensor(row).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_token_logprob_grad__writes_over_the_logits(backend):
    logits, targets, scale = case(T=5, V=333, dtype=torch.bfloat16)
    keep = torch.rand(5, 333) < 0.7
    rows = [row.float() for row in rows_of(logits.masked_fill(~keep, -INF), scale, 300)]
    args = (targets, scale, 0, 300, *rows)
    with use_backend(backend):
        wanted = token_logprob_grad(logits, *args, keep_mask=keep)
        before = logits.clone()
        version = logits._version
        assert token_logprob_grad_(logits, *args, keep_mask=keep) is logits
    assert torch.equal(logits, wanted) and logits._version > version
    torch.library.opcheck(over_op.overload, (before, *args, keep))


def shards_of(logits, targets, scale, sizes, keep=None):
    """[R, 4, T] statistics of columns in parts of these sizes."""
    firsts = [sum(sizes[:r]) for r in range(len(sizes))]
    return torch.stack(
        [
            token_logprob_stats(
                logits[:, first : first + size].contiguous(),
                targets,
                scale,
                first,
                size,
                None if keep is None else keep[:, first : first + size].contiguous(),
            )
            for first, size in zip(firsts, sizes, strict=True)
        ]
    )


def check_rows(rows, combine, dtype, device="cpu"):
    """``rows`` and ``combine`` of a backend against float64: rows of any range, and one without a
    finite logit, one of NaN, targets that are not kept or out of range."""
    logits, targets, scale, keep = ranges(V=40_000, dtype=dtype)
    logits = torch.cat([logits, logits[:4]])
    keep = torch.cat([keep, keep[:4]])
    targets = torch.cat([targets, targets[:4]])
    scale = torch.cat([scale, scale[:4]])
    logits[8], logits[9, 7], targets[11] = -INF, torch.nan, 40_000
    keep[9, 7], keep[10, -1] = True, False
    logits, targets, scale, keep = (t.to(device) for t in (logits, targets, scale, keep))
    for mask in (None, keep):
        wide = (logits.double(), targets, scale.double(), 40_000)
        exact = torch.stack(reference.rows(*wide, mask))
        assert exact[0, [8, 9, 11]].tolist()[0] == -INF and exact[0, [9, 11]].isnan().all()
        shards = shards_of(logits, targets, scale, (9_000, 30_999, 1), mask)
        for ours in (
            rows(logits, targets, scale, 40_000, mask),
            combine(shards, targets, scale, 40_000),
        ):
            found = torch.stack(list(ours)).double()
            found[2, 9] = exact[2, 9]  # the maximum next to a NaN is any number
            torch.testing.assert_close(found, exact, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("kernel", ["native", "emulated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprob_rows_and_combine_equal_float64(kernel, dtype):
    source = emulated if kernel == "emulated" else native
    rows = emulated.token_logprob_rows if source is emulated else native.rows
    combine = emulated.token_logprob_combine if source is emulated else native.combine
    check_rows(rows, combine, dtype)


@pytest.mark.parametrize("kernel", ["native", "emulated"])
@pytest.mark.parametrize("V", [5, 301, 4096])
def test_token_logprob_grad_writes_halves_of_floats(kernel, V):
    logits, targets, scale = case(T=6, V=V)
    rows = [row.float() for row in rows_of(logits, scale, V)]
    rows[3][2] = rows[4][2] = 0  # a row that is not read
    grad = emulated.token_logprob_grad if kernel == "emulated" else token_logprob_grad
    for width in (V, V - 2):
        args = (logits, targets, scale, 0, width, *rows)
        floats = grad(*args)
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(grad(*args, dtype=dtype), floats.to(dtype))


def on_device(device):
    """Triton, and where the device is a GPU the CUDA kernels too."""
    for dtype in DTYPES:
        for backend in ("triton", "native") if device == "cuda" else ("triton",):
            with use_backend(backend):
                check_ranges(token_logprob_stats, token_logprob_grad, dtype, device)
                check_rows(token_logprob_rows, token_logprob_combine, dtype, device)
                logits, targets, scale = (a.to(device) for a in case(T=3, V=77, dtype=dtype))
                rows = [r.float().to(device) for r in rows_of(logits.cpu(), scale.cpu(), 70)]
                for width in (0, 70):
                    stats = token_logprob_stats(logits, targets, scale, 3, width)
                    peer = reference.stats(logits, targets, scale, 3, width)
                    torch.testing.assert_close(stats, peer)
                grad = token_logprob_grad(logits, targets, scale, 3, 70, *rows)
                if dtype == torch.float32:
                    half = token_logprob_grad(
                        logits, targets, scale, 3, 70, *rows, dtype=torch.bfloat16
                    )
                    torch.testing.assert_close(half, grad.bfloat16())
                assert grad[:, 70:].count_nonzero() == 0
                assert token_logprob_grad_(logits, targets, scale, 3, 70, *rows) is logits
                assert torch.equal(logits, grad)


def triton_equals_reference():
    on_device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_token_logprob_on_a_gpu_equals_float64():
    on_device("cuda")
