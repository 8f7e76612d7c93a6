import pytest
import torch
import torch.distributed as dist

from pyrl_ext.loss import vocab_parallel
from pyrl_ext.ops import use_backend
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

T = 13
VOCAB = 1016
VALID = 1001
INF = torch.inf


def problem(dtype=torch.float64, spread=6.0, offset=0.0):
    g = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(T, VOCAB, generator=g, dtype=torch.float64) + offset).to(dtype)
    logits[:, VALID:] = 77.0  # what a padded vocabulary may hold must not matter
    logits[0, :300] = -INF  # with four ranks: the whole first shard
    targets = torch.randint(300, VALID, (T,), generator=g)
    targets[-1] = VALID - 1
    temperature = 0.5 + torch.rand(T, generator=g, dtype=torch.float64)
    weights = torch.randn(2, T, generator=g, dtype=torch.float64)
    return logits, targets, temperature, weights


def kept(targets):
    """A sampler's support: a third of the columns, and the targets but one."""
    keep = torch.rand(T, VOCAB, generator=torch.Generator().manual_seed(1)) < 0.3
    return keep.index_put_((torch.arange(T), targets), torch.arange(T) != 2)


def exact(dtype, masked=False, **change):
    """Log-probs, entropies and the gradient of their weighted sum, by torch in float64."""
    logits, targets, temperature, weights = problem(dtype, **change)
    leaf = logits.double().requires_grad_()
    x = leaf.masked_fill(~kept(targets), -INF) if masked else leaf
    log_p = (x[:, :VALID] / temperature[:, None]).log_softmax(-1)
    logprob = log_p.gather(1, targets[:, None])[:, 0]
    finite = log_p.masked_fill(log_p == -INF, 0)
    entropy = -(finite.exp() * finite * (log_p != -INF)).sum(-1)
    finite = torch.stack([logprob.masked_fill(logprob == -INF, 0), entropy])
    (grad,) = torch.autograd.grad((weights * finite).sum(), leaf)
    return logprob.detach(), entropy.detach(), grad.nan_to_num()


def shard_of(group, dtype, **change):
    logits, targets, temperature, weights = problem(dtype, **change)
    if group is not None:
        logits = logits.chunk(group.size(), 1)[group.rank()].contiguous()
    return logits.requires_grad_(), targets, temperature, weights


def solve(group, dtype, masked=False, **change):
    """The same as ``exact``, on this rank; the logits must stay, a second backward must agree."""
    logits, targets, temperature, weights = shard_of(group, dtype, **change)
    before = logits.detach().clone()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    keep = kept(targets).chunk(size, 1)[rank] if masked else None

    def weighted(x, **how):
        logprob, entropy = vocab_parallel.logprobs(
            x,
            targets,
            group,
            **dict(temperature=temperature, valid_vocab=VALID, keep_mask=keep, with_entropy=True),
            **how,
        )
        assert logprob.dtype == entropy.dtype == wide
        values = torch.stack([logprob.masked_fill(logprob == -INF, 0), entropy])
        return logprob, entropy, (weights.to(wide) * values).sum()

    logprob, entropy, total = weighted(logits)
    (grad,) = torch.autograd.grad(total, logits, retain_graph=True)
    (again,) = torch.autograd.grad(total, logits)
    assert torch.equal(logits, before), "forward or backward wrote into the logits"
    assert torch.equal(grad, again), "the second backward differs from the first"
    over = logits * 1
    (again,) = torch.autograd.grad(weighted(over, inplace=True)[2], over)
    assert torch.equal(grad, again) and again.data_ptr() == over.data_ptr()
    return logprob.detach(), entropy.detach(), grad


CASES = {
    "float64": dict(dtype=torch.float64),
    "float32": dict(dtype=torch.float32),
    "bfloat16": dict(dtype=torch.bfloat16),
    "float16": dict(dtype=torch.float16),
    "far below": dict(dtype=torch.float32, offset=-1e4),
    "certain": dict(dtype=torch.float32, spread=2e3),
    "flat": dict(dtype=torch.bfloat16, spread=1e-3),
    "support": dict(dtype=torch.float32, masked=True),
}


SIZES = (1, 2, 4)


def on_rank(world):
    """All cases in groups of 1, 2 and 4 of the four ranks, so that processes start once."""
    collectives = []
    all_gather = dist.all_gather_into_tensor

    def counted(*args, **kwargs):
        collectives.append("all_gather")
        return all_gather(*args, **kwargs)

    dist.all_gather_into_tensor = counted
    results = {}
    for size in SIZES:
        blocks = [list(range(first, first + size)) for first in range(0, world.size(), size)]
        groups = [dist.new_group(block) for block in blocks]
        collectives.clear()
        mine = groups[world.rank() // size]
        results[size] = {name: solve(mine, **change) for name, change in CASES.items()}
        assert len(collectives) == (2 * len(CASES) if size > 1 else 0), collectives
    return results


@pytest.fixture(scope="module")
def by_rank():
    return run_ranks(on_rank, max(SIZES))


@pytest.fixture(params=SIZES, ids=lambda size: f"{size} ranks")
def results(request, by_rank):
    return [rank[request.param] for rank in by_rank[: request.param]]


def relative(value, expected):
    return ((value - expected) / expected.abs().clamp(min=1)).abs().max()


@pytest.mark.parametrize("name", CASES)
def test_vocab_parallel_logprob_is_right_against_float64(results, name):
    logprob, entropy, grad = exact(**CASES[name])
    bound = 1e-12 if name == "float64" else 2e-5
    for rank in results:
        assert torch.equal(rank[name][0] == -INF, logprob == -INF)
        assert relative(rank[name][0][logprob > -INF], logprob[logprob > -INF]) <= bound
        assert relative(rank[name][1], entropy) <= bound
    ours = torch.cat([rank[name][2] for rank in results], 1)
    assert torch.equal(ours[:, VALID:], torch.zeros_like(ours[:, VALID:]))
    step = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), grad, rtol=2 * step, atol=max(bound, step**2))


@pytest.mark.parametrize("name", CASES)
def test_vocab_parallel_logprob_has_the_same_bits_on_all_ranks(results, name):
    for rank in results[1:]:
        assert torch.equal(rank[name][0], results[0][name][0])
        assert torch.equal(rank[name][1], results[0][name][1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_vocab_parallel_logprob_passes_gradcheck(with_entropy, masked):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2])
    keep = logits > -0.5
    keep[torch.arange(3), targets] = True

    def function(logits):
        return vocab_parallel.logprobs(
            logits,
            targets,
            temperature=0.7,
            valid_vocab=6,
            keep_mask=keep if masked else None,
            with_entropy=with_entropy,
        )

    assert torch.autograd.gradcheck(function, logits)


def test_vocab_parallel_logprob_defaults_to_log_softmax():
    logits, targets, _, _ = problem(torch.float32)
    expected = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert relative(vocab_parallel.logprobs(logits, targets), expected) <= 2e-5


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_vocab_parallel_logprob_refuses_a_second_backward_in_place(backend):
    logits, targets, _, _ = problem(torch.bfloat16)
    weight = torch.ones((), requires_grad=True)
    over = logits * weight
    also = over.exp()  # keeps its own output; the logits are read by nobody else
    with use_backend(backend):
        logprob = vocab_parallel.logprobs(over, targets, inplace=True)
        (logprob.sum() + also.mean()).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logprob.sum().backward()


def test_vocab_parallel_logprob_in_place_reports_others_that_saved_the_logits():
    logits, targets, _, _ = problem(torch.float32)
    over = logits.requires_grad_() * 1
    squares = (over * over).sum()
    vocab_parallel.logprobs(over, targets, inplace=True).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_vocab_parallel_logprob_of_rows_without_a_finite_logit():
    logits = torch.tensor([[-INF, -INF, -INF], [0.0, -INF, -INF], [0.0, 0.0, 0.0]])
    logits.requires_grad_()
    targets = torch.tensor([1, 1, 1])
    for backend in ("native", "reference"):
        with use_backend(backend):
            logprob, entropy = vocab_parallel.logprobs(logits, targets, with_entropy=True)
            (grad,) = torch.autograd.grad(logprob[[0, 2]].sum() + entropy.sum(), logits)
        assert logprob[:2].tolist() == [-INF, -INF]
        assert entropy[:2].tolist() == [0, 0]
        assert grad[:2].count_nonzero() == 0 and grad.isfinite().all()


@pytest.mark.parametrize("inplace", [False, True])
def test_vocab_parallel_logprob_compiles_without_a_graph_break(inplace):
    logits, targets, temperature, _ = problem(torch.float32)
    logits.requires_grad_()
    temperature = temperature.float()

    def function(logits):
        logprob, entropy = vocab_parallel.logprobs(
            logits * 1, targets, temperature=temperature, with_entropy=True, inplace=inplace
        )
        return (logprob + entropy).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad(function(logits), logits)
    (grad,) = torch.autograd.grad(compiled(logits), logits)
    assert torch.equal(grad, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_vocab_parallel_logprob_on_a_gpu_gives_nan_for_a_bad_target():
    logits, targets, temperature, _ = problem(torch.float32)
    expected, _, _ = exact(torch.float32)
    targets[1] = VALID
    logprob = vocab_parallel.logprobs(
        logits.cuda(), targets.cuda(), temperature=temperature.cuda(), valid_vocab=VALID
    ).cpu()
    assert logprob[1].isnan()
    assert relative(logprob[2:], expected[2:]) <= 2e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(targets=torch.tensor([0, 6])), "targets[1] is 6, expected one in [0, 6)"),
        (dict(targets=torch.tensor([-1, 0])), "targets[0] is -1, expected one in [0, 6)"),
        (dict(targets=torch.tensor([0])), "targets [1], expected [..., V_local], [...]"),
        (dict(valid_vocab=9), "valid_vocab is 9, expected one in [1, 8]"),
        (dict(temperature=0.0), "temperature is 0.0, expected a positive number"),
        (dict(temperature=torch.tensor([1.0, torch.nan])), "temperature[1] is nan"),
        (
            dict(keep_mask=torch.ones(2, 7, dtype=torch.bool)),
            "keep_mask is torch.bool [2, 7], expected torch.bool [2, 8]",
        ),
        (dict(temperature=torch.ones(3)), "temperature [3], expected one number or [2]"),
    ],
)
def test_vocab_parallel_logprob_refuses_wrong_arguments(change, message):
    args = dict(targets=torch.tensor([0, 1]), valid_vocab=6) | change
    with pytest.raises(ValueError) as error:
        vocab_parallel.logprobs(torch.zeros(2, 8), **args)
    assert str(error.value).startswith("vocab_parallel.logprobs: ") and message in str(error.value)


@pytest.mark.parametrize("inplace", [False, True])
def test_logprobs_keeps_the_shape_of_targets(inplace):
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, 7, generator=draw, dtype=torch.float64)
    targets = torch.randint(7, (2, 3), generator=draw)
    temperature = torch.rand(2, 3, generator=draw) + 0.5
    keep = torch.rand(2, 3, 7, generator=draw) < 0.8
    keep.scatter_(-1, targets[..., None], True)
    results = []
    for shape in ((2, 3), (6,)):
        leaf = logits.clone().requires_grad_()
        logprob, entropy = vocab_parallel.logprobs(
            leaf.clone().view(*shape, 7),
            targets.view(shape),
            temperature=temperature.view(shape),
            keep_mask=keep.view(*shape, 7),
            with_entropy=True,
            inplace=inplace,
        )
        assert logprob.shape == entropy.shape == shape
        (logprob.sum() + 2 * entropy.sum()).backward()
        assert leaf.grad is not None
        results.append(torch.cat([logprob.flatten(), entropy.flatten(), leaf.grad.flatten()]))
    assert torch.equal(*results)


def test_vocab_parallel_logprob_in_place_needs_contiguous_logits():
    with pytest.raises(ValueError, match=r"strides \[1, 2\], expected contiguous"):
        vocab_parallel.logprobs(torch.zeros(8, 2).t(), torch.tensor([0, 1]), inplace=True)


def test_entropy_is_that_of_logprobs():
    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)).double()
    logits.requires_grad_()
    entropy = vocab_parallel.entropy(logits, temperature=0.7, valid_vocab=33)
    log_p = (logits[..., :33] / 0.7).log_softmax(-1)
    exact = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(entropy, exact)
    weights = torch.linspace(-1, 1, 15).double().view(3, 5)
    (grad,) = torch.autograd.grad((entropy * weights).sum(), logits)
    (right,) = torch.autograd.grad((exact * weights).sum(), logits)
    torch.testing.assert_close(grad, right)
