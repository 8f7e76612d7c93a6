"""The rows of experts: kernels against a loop over experts and tokens."""

import pytest
import torch

from pyrl_ext.ops import expert_rows, use_backend
from pyrl_ext.ops._arguments import FLOATS
from pyrl_ext.ops._native import C
from pyrl_ext.ops.expert_rows import native, reference
from pyrl_ext.ops.expert_rows import op as rows_op
from tests.helpers import emulated

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
# tokens, experts, of a token; the last experts without a token
SHAPES = [
    (0, 8, 2, 0),
    (1, 1, 1, 0),
    (5, 4, 4, 0),
    (33, 7, 3, 2),
    (255, 8, 2, 4),
    (256, 16, 3, 0),
    (300, 64, 6, 40),
    (513, 130, 8, 0),
    (40, 300, 9, 0),
    (700, 512, 2, 500),
]


def case(shape, dtype=torch.float32):
    """A routing map, probabilities, and a gradient of the rows' weights."""
    tokens, experts, top_k, idle = shape
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, experts - idle, generator=g)
    ids = scores.topk(top_k).indices
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, ids, True)
    probs = torch.rand(tokens, experts, generator=g, dtype=torch.float64).to(dtype)
    return chosen, probs, torch.randn(tokens * top_k, generator=g).to(dtype)


def by_loop(chosen, probs, grad):
    """All that the operator and its gradient give, one row after the other."""
    tokens, experts = chosen.shape
    pairs = [
        (t, e) for e, own in enumerate(chosen.T.tolist()) for t, here in enumerate(own) if here
    ]
    of_token = [[] for _ in range(tokens)]
    out = torch.zeros_like(probs)
    for m, (t, e) in enumerate(pairs):
        of_token[t].append(m)
        out[t, e] = grad[m]
    starts = [sum(map(len, of_token[:t])) for t in range(tokens + 1)]
    t, e = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    order = torch.tensor([m for own in of_token for m in own], dtype=torch.int64)
    counts = torch.tensor([sum(own) for own in chosen.T.tolist()], dtype=torch.int32)
    starts = torch.tensor(starts, dtype=torch.int64)
    return probs[t, e], t, starts, order, t * experts + e, counts, out


def check(forward, backward, shape, dtype):
    chosen, probs, grad = case(shape, dtype)
    *expected, expected_grad = by_loop(chosen, probs, grad)
    found = forward(chosen, probs, shape[2])
    for name, ours, theirs in zip(native.NAMES, found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    _, _, _, order, places, _ = found
    assert torch.equal(backward(grad, order, places, *chosen.shape), expected_grad)


@pytest.mark.parametrize("module", [reference, native, emulated], ids=lambda m: m.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expert_rows_kernels_sort_as_a_loop_does(module, shape):
    for dtype in FLOATS if shape[0] < 50 else (torch.float32,):
        check(module.expert_rows, module.expert_rows_grad, shape, dtype)


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expert_rows_on_a_gpu_sort_as_a_loop_does(backend, shape):
    def on_gpu(run):
        def call(*args):
            with use_backend(backend):
                out = run(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in args))
            return out.cpu() if isinstance(out, torch.Tensor) else [x.cpu() for x in out]

        return call

    for dtype in FLOATS:
        grad = torch.ops.pyrl_ext.expert_rows_grad
        check(on_gpu(rows_op), on_gpu(grad), shape, dtype)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_expert_rows_have_gradients_of_both_orders(backend):
    chosen, probs, _ = case(SHAPES[3], torch.float64)
    inputs = probs.requires_grad_()
    with use_backend(backend):

        def weights(x):
            return expert_rows(chosen, x, 3).weights

        assert torch.autograd.gradcheck(weights, inputs)
        assert torch.autograd.gradgradcheck(weights, inputs)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_expert_rows_are_the_same_with_any_number_of_threads(threads):
    chosen, probs, _ = case((20000, 64, 6, 3))
    expected = reference.expert_rows(chosen, probs, 6)
    out = reference.new_outputs(probs, 6)
    C.expert_rows_cpu(args=native.arguments(chosen, probs, 6, out), threads=threads)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_expert_rows_grids_are_those_of_many_tokens():
    """70,000 tokens are 274 tiles, whose counts a block adds up."""
    chosen, probs, _ = case((70000, 8, 2, 1))
    expected = reference.expert_rows(chosen, probs, 2)
    found = emulated.expert_rows(chosen, probs, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_expert_rows_take_maps_that_are_not_contiguous():
    chosen, probs, _ = case(SHAPES[6])
    expected = expert_rows(chosen, probs, 6)
    found = expert_rows(chosen.T.contiguous().T, probs.T.contiguous().T, 6)
    assert torch.equal(found.weights, expected.weights) and torch.equal(found.rows, expected.rows)


def test_expert_rows_refuses_more_experts_than_a_block_keeps():
    chosen, probs, _ = case((3, 513, 2, 0))
    with use_backend("native"), pytest.raises(NotImplementedError, match="2 of 513 experts"):
        expert_rows(chosen, probs, 2)
    assert len(expert_rows(chosen, probs, 2).rows) == 6


def triton_equals_reference():
    for n, shape in enumerate(SHAPES[1:7]):
        with use_backend("triton"):
            dtype = (torch.float32, torch.float64)[n % 2]
            check(rows_op, torch.ops.pyrl_ext.expert_rows_grad, shape, dtype)
    chosen, probs, _ = case(SHAPES[0])
    with use_backend("triton"):
        assert expert_rows(chosen, probs, 2).inverse.starts.tolist() == [0]
