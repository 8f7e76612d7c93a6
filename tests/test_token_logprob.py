"""The local halves of the log-prob: accuracy against float64 and the cases that make NaN."""

import pytest
import torch

from pyrl_ext.ops import token_logprob_grad, token_logprob_stats, use_backend
from pyrl_ext.ops._native import C
from pyrl_ext.ops.token_logprob import grad_op, native, reference, stats_op

INF = torch.inf
ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(not C.has_isa(isa), reason=f"no {isa} here"))
    for isa in ("avx512", "avx2", "portable")
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
def test_stats_against_float64(isa, dtype, V):
    logits, targets, scale = case(V=V, dtype=dtype)
    for first, width in [(0, V), (0, max(V - 3, 0)), (-5, V), (V, V)]:
        exact = reference.stats(logits.double(), targets, scale.double(), first, width)
        ours = native.stats(logits, targets, scale, first, width, isa=isa)
        peer = reference.stats(logits, targets, scale, first, width)
        assert torch.equal(ours[[0, 3]], exact[[0, 3]].float())
        error, peer_error = (relative(s[1:3], exact[1:3]) for s in (ours, peer))
        assert error <= 2 * peer_error + 2e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V", [1, 7, 31, 64, 2048, 2049, 5003])
def test_grad_against_float64(isa, dtype, V):
    logits, targets, scale = case(V=V, dtype=dtype)
    width = max(V - 3, 1)
    rows = rows_of(logits, scale, width)
    narrow = [row.float() for row in rows]
    exact = reference.grad(logits.double(), targets, scale.double(), 0, width, *rows)
    ours = native.grad(logits, targets, scale, 0, width, *narrow, isa=isa)
    peer = reference.grad(logits, targets, scale, 0, width, *narrow)
    assert ours.dtype == dtype and torch.equal(ours[:, width:], torch.zeros_like(ours[:, width:]))
    error, peer_error = ((g.double() - exact).abs().max() for g in (ours, peer))
    assert error <= 2 * peer_error + 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_read_and_written_as_torch_does(isa, dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    columns = every[:, None].contiguous()  # one valid column: the target logit is the column
    tokens = len(every)
    stats = native.stats(
        columns, torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens), 0, 1, isa=isa
    )
    assert torch.equal(stats[3].nan_to_num(7.25), every.float().nan_to_num(7.25))

    # A gradient that is any float: two columns with p = 1/2 and a gradient of -2 * value.
    g = torch.Generator().manual_seed(0)
    values = torch.randint(-(1 << 31), 1 << 31, (20_000,), generator=g, dtype=torch.int64)
    values = values.to(torch.int32).view(torch.float32)
    values = torch.cat([values, torch.logspace(-9, 5, 4000), -torch.logspace(-9, 5, 4000)])
    values = values[values.isfinite() & (values.abs() < 1e38) & (values.abs() > 1e-37)]
    T = len(values)
    half = torch.full((T,), 2.0).log()
    out = native.grad(
        *(torch.zeros(T, 2, dtype=dtype), torch.full((T,), 5), torch.ones(T), 0, 2),
        *(torch.zeros(T), half, half, -2 * values, torch.zeros(T)),
        isa=isa,
    )
    wanted = values.to(dtype)
    step = (out[:, 0].view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert step.max() <= 1 and (step > 0).float().mean() < 1e-3  # p is 1/2 to 1e-7


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_nan_from_infinities(backend, dtype):
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
            *(logits, targets, scale, 0, V, top, total.log(), total.log().clamp(min=0)),
            *(torch.ones(len(rows)), torch.ones(len(rows))),
        )
    assert grad.isfinite().all()
    assert torch.equal(grad[1:4].count_nonzero(1), torch.zeros(3, dtype=torch.int64))
    assert grad[0, :3].count_nonzero() == 0 and grad[0, 3] == 1 and grad[0, 4000] < 0


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("poison", [torch.nan, INF])
@pytest.mark.parametrize("where", [0, 2047, 4999, slice(None)], ids=str)
def test_nan_and_inf_show_and_stay_in_their_row(backend, poison, where):
    logits, targets, scale = case(T=3, V=5000)
    logits[1, where] = poison
    with use_backend(backend):
        stats = token_logprob_stats(logits, targets, scale, 0, 5000)
    assert stats[1].isnan().tolist() == [False, True, False]


def test_a_row_without_gradient_is_not_read():
    logits, targets, scale = case(T=3, V=100)
    rows = [row.float() for row in rows_of(logits, scale, 100)]
    rows[3][1] = rows[4][1] = 0
    logits[1] = torch.nan
    for backend in ("native", "reference"):
        with use_backend(backend):
            grad = token_logprob_grad(logits, targets, scale, 0, 100, *rows)
        assert grad[1].count_nonzero() == 0 and grad[0].count_nonzero() == 100


def test_a_payload_does_not_hide_a_nan():
    bits = torch.tensor([[0x7F800000 | 0x1FF, 0]], dtype=torch.int32)
    logits = bits.view(torch.float32)
    for isa in ("avx512", "avx2", "portable"):
        if C.has_isa(isa):
            zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
            assert native.stats(logits, zero, one, 0, 2, isa=isa)[1].isnan()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads):
    args = (*case(T=37, V=3000, dtype=torch.bfloat16), 0, 3000)
    one = native.stats(*args)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(native.stats(*args), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    logits, targets, scale = case(V=50, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = scale.to(wide)
    torch.library.opcheck(stats_op.overload, (logits, targets, scale, 0, 47))
    rows = [row.to(wide) for row in rows_of(logits, scale, 47)]
    torch.library.opcheck(grad_op.overload, (logits, targets, scale, 0, 47, *rows))


def test_named_backend_and_arguments_that_do_not_fit():
    logits, targets, scale = case(V=10)
    wide = logits.double(), targets, scale.double()
    with use_backend("native"), pytest.raises(NotImplementedError, match=r"torch\.float64"):
        token_logprob_stats(*wide, 0, 10)
    with pytest.raises(ValueError, match=r"width is 11, expected one in \[0, 10\]"):
        token_logprob_stats(logits, targets, scale, 0, 11)
    with pytest.raises(ValueError, match=r"scale is torch.float64 \[9\], expected torch.float32"):
        token_logprob_stats(logits, targets, scale.double(), 0, 10)
    with pytest.raises(ValueError, match=r"logits is torch.int64"):
        token_logprob_stats(targets[:, None], targets, scale, 0, 1)
