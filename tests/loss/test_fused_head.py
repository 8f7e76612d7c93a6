import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyrl_ext.loss.fused_head import linear_logprob, linear_logprob_loss, tiles
from pyrl_ext.loss.fused_head.chunking import chunk_tokens
from pyrl_ext.loss.sampling_mask import KeptSets
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

# with four ranks the last one holds nothing but padding
T = 48
H = 16
VOCAB = 2400
VALID = 1800
CHUNK = 20 * VOCAB * 4  # bytes: 20 tokens of float32 on one rank
ROWS = torch.tensor([0, 1, 5, 6, 7, 20, 21, 22, 23, 30, 41, 47])
CACHES = {"recompute": 0, "cache": 1 << 30, "some cached": 25 * VOCAB * 2}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def problem(dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, H, generator=g, dtype=torch.float64).to(dtype)
    weight[VALID:] = 9  # what a padded vocabulary may hold must not matter
    targets = torch.randint(0, VALID, (T,), generator=g)
    targets[-1] = VALID - 1
    temperature = 0.5 + torch.rand(T, generator=g, dtype=torch.float64)
    coefficients = torch.randn(2, T, generator=g, dtype=torch.float64)
    return hidden, weight, targets, temperature, coefficients


def sets_of(targets):
    """Sets that tokens are drawn from: one to nine columns, or for every fifth all of them."""
    g = torch.Generator().manual_seed(3)
    sets = [
        sorted({int(target), *torch.randint(0, VALID, (t % 9,), generator=g).tolist()})
        for t, target in enumerate(targets)
    ]
    return [None if t % 5 == 4 else each for t, each in enumerate(sets)]


def kept_of(targets):
    sets = sets_of(targets)
    counts = [-1 if each is None else len(each) for each in sets]
    ids = [column for each in sets for column in each or ()]
    return KeptSets(*(torch.tensor(each, dtype=torch.int32) for each in (counts, ids)))


def exact(dtype, rows=None, kept=False):
    """Log-probs, entropies and gradients of their weighted sum over ``rows``, in float64."""
    hidden, weight, targets, temperature, coefficients = problem(dtype)
    leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (leaves[0] @ leaves[1].t())[:, :VALID] / temperature[:, None]
    log_p = logits.log_softmax(-1)
    logprob = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    if kept:  # token by token
        logprob = logprob.clone()
        entropy = entropy.clone()
        for t, each in enumerate(sets_of(targets)):
            if each is not None:
                log_p = logits[t, each].log_softmax(-1)
                logprob[t] = log_p[each.index(int(targets[t]))]
                entropy[t] = -(log_p.exp() * log_p).sum()
    chosen = slice(None) if rows is None else rows
    total = (coefficients * torch.stack([logprob, entropy]))[:, chosen].sum()
    of_hidden, of_weight = torch.autograd.grad(total, leaves)
    if rows is not None:
        part = torch.full((2, T), torch.nan, dtype=torch.float64)
        part[:, rows] = torch.stack([logprob, entropy])[:, rows].detach()
        logprob, entropy = part
    return [x.detach() for x in (logprob, entropy, of_hidden, of_weight)]


def shard_of(group, dtype, sequence_parallel):
    """(hidden and weight of this rank with gradients, the rest of the problem)"""
    hidden, weight, *rest = problem(dtype)
    if group is not None:
        rank = group.rank()
        size = group.size()
        weight = weight.chunk(size)[rank].clone()
        hidden = hidden.chunk(size)[rank].clone() if sequence_parallel else hidden
    return hidden.requires_grad_(), weight.requires_grad_(), *rest


def solve(group, dtype, mode="recompute", sequence_parallel=False, rows=None, kept=False):
    """The same as ``exact``, on this rank: d(hidden) of its rows, d(weight) of its columns."""
    hidden, weight, targets, temperature, coefficients = shard_of(group, dtype, sequence_parallel)
    coefficients = coefficients.to(torch.promote_types(dtype, torch.float32))
    settings: dict[str, Any] = dict(
        temperature=temperature, valid_vocab=VALID, rows=rows, chunk_bytes=CHUNK
    )
    settings["sequence_parallel"] = sequence_parallel
    settings["kept"] = kept_of(targets) if kept else None
    if mode == "loss":
        found = torch.full((2, T), torch.nan, dtype=coefficients.dtype)

        def loss_fn(logprob, entropy, tokens):
            found[:, tokens] = torch.stack([logprob, entropy]).detach()
            return (coefficients[:, tokens] * torch.stack([logprob, entropy])).sum()

        total = linear_logprob_loss(hidden, weight, targets, loss_fn, group, **settings)
        values = found
    else:
        settings["cache_bytes"] = CACHES[mode]
        values = torch.stack(linear_logprob(hidden, weight, targets, group, **settings))
        total = (coefficients * values)[:, slice(None) if rows is None else rows].sum()
    grads = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(total, (hidden, weight))
    assert all(torch.equal(*pair) for pair in zip(grads, again, strict=True))
    return [*values.detach(), *grads]


def assert_right(ours, expected, dtype, mode):
    assert ours[0].dtype == ours[1].dtype == torch.promote_types(dtype, torch.float32)
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(
        torch.stack(ours[:2]).double(), torch.stack(expected[:2]), rtol=bound, atol=bound,
        equal_nan=True,
    )  # fmt: skip
    # gradients of logits are rounded to the type of the weight; cached logits are off by 2^-9 of
    # their distance from the largest, probabilities by p * |log p| * 2^-9
    step = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    if mode not in ("recompute", "loss"):
        step += 2**-8
    for ours_of, expected_of in zip(ours[2:], expected[2:], strict=True):
        assert ours_of.dtype == dtype
        error = (ours_of.double() - expected_of).abs().max()
        assert error <= 2 * step * expected_of.abs().max(), (error, expected_of.abs().max())


@pytest.mark.parametrize("tile", [tiles.CPU_TILE, 1], ids=["one tile", "tiles"])
@pytest.mark.parametrize("rows", [None, ROWS], ids=["all", "rows"])
@pytest.mark.parametrize("mode", [*CACHES, "loss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["full", "kept"])
def test_linear_logprob_is_right_against_float64(dtype, mode, rows, tile, kept, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE", tile)
    ours = solve(None, dtype, mode, rows=rows, kept=kept)
    assert_right(ours, exact(dtype, rows, kept), dtype, mode)


def test_linear_logprob_refuses_sets_of_other_tokens():
    hidden, weight, targets, *_ = problem(torch.float32)
    short = kept_of(targets).select(torch.arange(T - 1))
    with pytest.raises(ValueError, match="47 kept sets, expected 48"):
        linear_logprob(hidden, weight, targets, kept=short)


def test_chunk_tokens_are_whole_tiles_of_a_gpu():
    cuda = torch.device("cuda")
    cpu = torch.device("cpu")
    assert [chunk_tokens(fit, cuda) for fit in (0, 1, 255, 256, 1155)] == [1, 1, 255, 256, 1024]
    assert [chunk_tokens(fit, cpu) for fit in (0, 1, 511, 9999)] == [1, 1, 511, 512]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_logprob_loss_gives_the_same_bits(dtype):
    for outside, inside in zip(solve(None, dtype), solve(None, dtype, "loss"), strict=True):
        assert torch.equal(outside, inside)


# Ranks --------------------------------------------------------------------------------------------

SIZES = (1, 2, 4)
LAYOUTS: dict[str, tuple[tuple, dict[str, Any]]] = {
    f"{mode}{', sequence' * sequence}{', rows' * some}{', kept' * kept} {dtype}": (
        (dtype, mode),
        dict(sequence_parallel=sequence, rows=ROWS if some else None, kept=kept),
    )
    for mode in ("recompute", "some cached", "loss")
    for sequence in (False, True)
    for some in (False, True)
    for dtype in (torch.float64, torch.bfloat16)
    for kept in (False, True)
    if dtype == torch.float64 or not kept
}


def on_rank(world):
    """Every layout in groups of 1, 2 and 4 of the four ranks, so that processes start once."""
    gathers = []
    all_gather = dist.all_gather_into_tensor

    def counted(*args, **kwargs):
        gathers.append(args)
        return all_gather(*args, **kwargs)

    dist.all_gather_into_tensor = counted
    tiles.CPU_TILE = 1  # several tiles
    results = {}
    for size in SIZES:
        blocks = [list(range(first, first + size)) for first in range(0, world.size(), size)]
        mine = [dist.new_group(block) for block in blocks][world.rank() // size]
        for name, (args, settings) in LAYOUTS.items():
            gathers.clear()
            results[size, name] = solve(mine, *args, **settings)
            if args[1] != "loss" and not settings["sequence_parallel"]:
                assert len(gathers) == (size > 1)
    return results


@pytest.fixture(scope="module")
def by_rank():
    return run_ranks(on_rank, max(SIZES))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_linear_logprob_does_not_depend_on_the_ranks(by_rank, size, name):
    (dtype, mode), settings = LAYOUTS[name]
    ranks = [rank[size, name] for rank in by_rank[:size]]
    for rank in ranks[1:]:
        assert torch.equal(rank[0].nan_to_num(7), ranks[0][0].nan_to_num(7))
        assert torch.equal(rank[1].nan_to_num(7), ranks[0][1].nan_to_num(7))
    of_hidden = [rank[2] for rank in ranks]
    if not settings["sequence_parallel"]:
        assert all(torch.equal(other, of_hidden[0]) for other in of_hidden)
        of_hidden = of_hidden[:1]
    whole = [*ranks[0][:2], torch.cat(of_hidden), torch.cat([rank[3] for rank in ranks])]
    assert_right(whole, exact(dtype, settings["rows"], settings["kept"]), dtype, mode)


# What autograd sees -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, torch.tensor([1, 4])], ids=["all", "rows"])
def test_linear_logprob_passes_gradcheck(rows):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 1, 3])
    settings: dict[str, Any] = dict(
        temperature=0.7, valid_vocab=6, rows=rows, chunk_bytes=2 * 7 * 8
    )

    def outside(hidden, weight):
        values = linear_logprob(hidden, weight, targets, **settings)
        return tuple(value if rows is None else value[rows] for value in values)

    def inside(hidden, weight):
        return linear_logprob_loss(hidden, weight, targets, square, **settings)

    def square(logprob, entropy, tokens):
        return (logprob.square() + logprob * entropy * (1 + tokens)).sum()

    assert torch.autograd.gradcheck(outside, (hidden, weight))
    assert torch.autograd.gradcheck(inside, (hidden, weight))


def test_linear_logprob_loss_scales_its_gradients_in_the_backward():
    hidden, weight, targets, *_ = problem(torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = linear_logprob_loss(hidden, weight, targets, lambda logprob, *_: logprob.sum())
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    twice = torch.autograd.grad(2 * loss, (hidden, weight))
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


def test_linear_logprob_loss_takes_a_loss_without_a_gradient():
    hidden, weight, targets, *_ = problem(torch.float32)
    hidden.requires_grad_()
    loss = linear_logprob_loss(hidden, weight, targets, lambda logprob, *_: logprob.detach().sum())
    assert torch.autograd.grad(loss, hidden)[0].count_nonzero() == 0
    with torch.no_grad():
        again = linear_logprob_loss(hidden, weight, targets, lambda logprob, *_: logprob.sum())
    assert torch.equal(loss, again) and not again.requires_grad


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_linear_logprob_adds_to_main_grad(inside, tied):
    hidden, weight, targets, *_ = problem(torch.bfloat16)
    hidden.requires_grad_()
    weight: Any = torch.nn.Parameter(weight)

    weight.main_grad = torch.ones(weight.shape)
    weight.grad_added_to_main_grad = False
    if tied:
        weight.zero_out_wgrad = True

    def loss(**settings):
        if inside:
            sum_of = lambda logprob, *_: logprob.sum()  # noqa: E731
            return linear_logprob_loss(hidden, weight, targets, sum_of, **settings)
        return linear_logprob(hidden, weight, targets, **settings)[0].sum()

    (plain,) = torch.autograd.grad(loss(), weight)
    for passes in (1, 2):
        weight.grad = None
        weight.grad_added_to_main_grad = False
        loss(main_grad=True).backward()
        assert weight.grad_added_to_main_grad and weight.grad is not None
        assert not tied or weight.grad.count_nonzero() == 0
        added = (weight.main_grad - 1) / passes
        torch.testing.assert_close(added, plain.float(), rtol=2**-8, atol=1e-4)
    assert not torch.equal(added, added.bfloat16().float()), "rounded to the weight's type"


def test_linear_logprob_does_not_round_sums_over_chunks():
    """4096 equal tokens: in bfloat16 a sum stops growing at 256 of them."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.int64)
    logprob, _ = linear_logprob(hidden, weight, targets, chunk_bytes=64)
    (grad,) = torch.autograd.grad(logprob.sum(), weight)
    assert grad.tolist() == [[2048.0], [-2048.0]]


def test_linear_logprob_gives_a_frozen_weight_no_gradient():
    hidden, weight, targets, *_ = problem(torch.float32)
    hidden.requires_grad_()
    with Operations() as operations:
        linear_logprob(hidden, weight, targets)[0].sum().backward()
    assert operations.count == 6 * T * H * VOCAB
    assert hidden.grad is not None and weight.grad is None


# What it costs ------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Floating-point operations of the matrix products."""

    count = by_onednn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.count += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        elif func.overloadpacket == torch.ops.mkldnn._linear_pointwise:
            a, b = args[:2]
            self.count += 2 * a.shape[0] * a.shape[1] * b.shape[0]
            self.by_onednn += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "per_token"), [("recompute", 8), ("cache", 6), ("loss", 6)], ids=lambda x: str(x)
)
def test_linear_logprob_does_the_promised_operations(mode, per_token):
    hidden, weight, targets, *_ = problem(torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    for rows, tokens in ((None, T), (ROWS, len(ROWS))):
        with Operations() as operations:
            if mode == "loss":
                sum_of = lambda logprob, *_: logprob.sum()  # noqa: E731
                loss = linear_logprob_loss(hidden, weight, targets, sum_of, rows=rows)
            else:
                cache = CACHES[mode]
                values = linear_logprob(hidden, weight, targets, rows=rows, cache_bytes=cache)
                loss = values[0].nansum()
            loss.backward()
        assert operations.count == per_token * tokens * H * VOCAB


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
@pytest.mark.parametrize("mode", ["recompute", "loss"])
def test_linear_logprob_is_right_by_either_library(mode):
    """oneDNN's on a CPU unless it is switched off; halves are multiplied as float32."""
    for dtype, onednn in ((torch.float32, True), (torch.bfloat16, True), (torch.float64, False)):
        counts = []
        for enabled in (True, False):
            with torch.backends.mkldnn.flags(enabled=enabled), Operations() as operations:
                assert_right(solve(None, dtype, mode), exact(dtype), dtype, mode)
            assert (operations.by_onednn > 0) == (onednn and enabled)
            counts.append(operations.count)
        assert counts[0] == counts[1]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_by_onednn_rounds_as_float32_does():
    """Its sums run in longer chains than a BLAS has, no type on the way is narrower."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(64, 2048, generator=g)
    b = torch.randn(2048, 512, generator=g)
    assert tiles.by_onednn(a) and not tiles.by_onednn(a.double()) and not tiles.by_onednn(a[:0])
    products = a.double() @ b.double()
    to = torch.ones(64, 512)
    tiles._add_mm(to, a, b)

    def error(found):
        return (found.double() - products).square().mean().sqrt().item()

    assert error(tiles._mm(a, b)) < 4 * error(a @ b) < 1e-3
    assert error(to - 1) < 5 * error(a @ b)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators returned and that are still there; ``peak`` of them."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)
        }
        for tensor in filter(torch.is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage not in self.seen:
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def free(self, size):
        self.now -= size


@pytest.mark.parametrize("mode", ["recompute", "cache", "loss"])
def test_linear_logprob_holds_a_chunk_and_the_cache(mode):
    tokens = 2048
    size = 256
    vocab = 32000
    chunk_bytes = 1 << 24
    cache_bytes = 1 << 25
    hidden = torch.randn(tokens, size).bfloat16().requires_grad_()
    weight = torch.randn(vocab, size).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    gradients = hidden.nbytes + weight.nbytes + 4 * weight.numel()  # the last: sums in float32
    cache = cache_bytes if mode == "cache" else 0
    with LiveBytes() as live:
        if mode == "loss":
            sum_of = lambda logprob, *_: logprob.sum()  # noqa: E731
            loss = linear_logprob_loss(hidden, weight, targets, sum_of, chunk_bytes=chunk_bytes)
        else:
            sizes: dict[str, Any] = dict(chunk_bytes=chunk_bytes, cache_bytes=cache)
            loss = linear_logprob(hidden, weight, targets, **sizes)[0].sum()
        loss.backward()
    above = live.peak - gradients
    whole = tokens * vocab * 4
    print(f"{mode}: {above / 2**20:.1f} MiB above gradients, all logits {whole / 2**20:.1f}")
    assert 0.9 * cache < above <= chunk_bytes + cache


# Edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, torch.tensor([], dtype=torch.int64)], ids=["all", "rows"])
def test_linear_logprob_takes_no_tokens(rows):
    tokens = 0 if rows is None else 3
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    logprob, entropy = linear_logprob(hidden, weight, targets, rows=rows)
    assert logprob.shape == entropy.shape == (tokens,) and logprob.isnan().all()
    for grad in torch.autograd.grad(logprob.sum(), (hidden, weight)):
        assert grad.count_nonzero() == 0
    loss = linear_logprob_loss(hidden, weight, targets, lambda logp, *_: logp.sum(), rows=rows)
    assert loss == 0


def test_linear_logprob_does_not_read_rows_outside():
    hidden, weight, targets, temperature, _ = problem(torch.float32)
    whole, _ = linear_logprob(hidden, weight, targets, temperature=temperature, valid_vocab=VALID)
    others = torch.ones(T, dtype=torch.bool)
    others[ROWS] = False
    hidden[others] = torch.nan
    targets[others] = -100
    temperature[others] = -1
    settings: dict[str, Any] = dict(temperature=temperature, valid_vocab=VALID, rows=ROWS)
    logprob, entropy = linear_logprob(hidden.requires_grad_(), weight, targets, **settings)
    torch.testing.assert_close(logprob[ROWS], whole[ROWS], rtol=1e-5, atol=1e-5)
    assert logprob[others].isnan().all() and entropy[others].isnan().all()
    (grad,) = torch.autograd.grad(logprob[ROWS].sum(), hidden)
    assert grad.isfinite().all() and grad[others].count_nonzero() == 0


def test_linear_logprob_keeps_what_is_not_finite_in_its_token():
    hidden, weight, targets, *_ = problem(torch.float32)
    hidden[3] = torch.nan
    hidden.requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, targets, chunk_bytes=CHUNK)
    (grad,) = torch.autograd.grad(logprob.sum() + entropy.sum(), hidden)
    for value in (logprob, entropy):
        assert value.isnan().nonzero().tolist() == [[3]]
    assert grad[torch.arange(T) != 3].isfinite().all()


def test_linear_logprob_takes_any_memory_layout():
    hidden, weight, targets, *_ = problem(torch.float32)
    expected = linear_logprob(hidden, weight, targets)[0]
    odd = torch.zeros(T, 2 * H)[:, ::2].copy_(hidden), weight.t().contiguous().t()
    assert torch.allclose(linear_logprob(*odd, targets)[0], expected, rtol=1e-6, atol=1e-5)


def test_linear_logprob_restores_the_precision_of_products():
    hidden, weight, targets, *_ = problem(torch.bfloat16)
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    seen = []

    def loss_fn(logprob, entropy, tokens):
        seen.append(matmul.fp32_precision)
        raise RuntimeError("unwell")

    linear_logprob(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="unwell"):
        linear_logprob_loss(hidden, weight, targets, loss_fn)
    assert seen == [before] and matmul.fp32_precision == before


@needs_gpu
@pytest.mark.parametrize("mode", [*CACHES, "loss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_logprob_on_a_gpu(dtype, mode):
    hidden, weight, targets, temperature, coefficients = (x.cuda() for x in problem(dtype))
    hidden.requires_grad_()
    weight.requires_grad_()
    settings: dict[str, Any] = dict(
        temperature=temperature, valid_vocab=VALID, rows=ROWS, chunk_bytes=CHUNK
    )
    rows = ROWS.cuda()
    coefficients = coefficients.to(torch.promote_types(dtype, torch.float32))
    if mode == "loss":
        total = linear_logprob_loss(
            hidden, weight, targets,
            lambda lp, ent, i: (coefficients[:, i] * torch.stack([lp, ent])).sum(), **settings,
        )  # fmt: skip
        values = torch.stack(linear_logprob(hidden.detach(), weight.detach(), targets, **settings))
    else:
        values = torch.stack(
            linear_logprob(hidden, weight, targets, cache_bytes=CACHES[mode], **settings)
        )
        total = (coefficients * values)[:, rows].sum()
    grads = torch.autograd.grad(total, (hidden, weight))
    ours = [x.detach().cpu() for x in (*values, *grads)]
    assert_right(ours, exact(dtype, ROWS), dtype, mode)


GOOD: dict[str, Any] = dict(
    hidden=torch.zeros(2, 3), weight=torch.zeros(8, 3), targets=torch.tensor([0, 1]), valid_vocab=6
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(targets=torch.tensor([0, 6])), "targets[1] is 6, expected one in [0, 6)"),
        (
            dict(targets=torch.tensor([0, -1]), rows=torch.tensor([1])),
            "targets[1] is -1, expected one in [0, 6)",
        ),
        (dict(targets=torch.tensor([0])), "targets [1], expected [T, H], [V_local, H], [T]"),
        (dict(weight=torch.zeros(8, 4)), "hidden [2, 3], weight [8, 4], targets [2], expected"),
        (dict(weight=torch.zeros(8, 3).half()), "weight torch.float16, expected one floating type"),
        (dict(valid_vocab=9), "valid_vocab is 9, expected one in [1, 8], the columns of 1 ranks"),
        (dict(temperature=0.0), "temperature is 0.0, expected a positive number"),
        (dict(temperature=torch.tensor([1.0, torch.nan])), "temperature[1] is nan"),
        (dict(temperature=torch.ones(3)), "temperature [3], expected one number or [2]"),
        (dict(rows=torch.tensor([2])), "rows[0] is 2, expected one in [0, 2)"),
        (dict(rows=torch.tensor([0.0])), "rows is torch.float32 [1] on cpu, expected torch.int64"),
        (dict(main_grad=True), "weight.main_grad is None, expected torch.float32 [8, 3]"),
    ],
)
def test_linear_logprob_refuses_wrong_arguments(change, message):
    inside = partial(linear_logprob_loss, loss_fn=lambda logprob, *_: logprob.sum())
    for function, name in ((linear_logprob, "linear_logprob"), (inside, "linear_logprob_loss")):
        with pytest.raises(ValueError) as error:
            function(**GOOD | change)
        assert str(error.value).startswith(f"{name}: ") and message in str(error.value)


def test_linear_logprob_loss_needs_one_number():
    with pytest.raises(ValueError, match=r"loss_fn returned \[2\], expected the sum"):
        linear_logprob_loss(**GOOD, loss_fn=lambda logprob, *_: logprob)
