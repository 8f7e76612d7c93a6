"""Probabilities of given experts: megatron-core's own, bit for bit, and their gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.ops import replay_probs, use_backend
from pyrl_ext.ops._arguments import FLOATS
from pyrl_ext.ops._native import C
from pyrl_ext.ops.replay_probs import ID_DTYPES, NORMS, grad_op, native, op, reference
from tests.helpers import emulated
from tests.helpers.threads import on_threads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHAPES = [  # (M, E, K)
    (1, 1, 1),
    (5, 4, 1),
    (33, 8, 2),
    (40, 7, 3),
    (70, 64, 4),
    (3, 8, 5),
    (65, 64, 6),
    (31, 128, 8),
    (40, 256, 9),
    (3, 384, 8),
    (30, 160, 12),
    (9, 16, 16),
    (20, 40, 31),
    (33, 64, 32),
]
EMPTY = [(0, 8, 2), (3, 8, 0), (3, 0, 0), (0, 0, 0)]


def case(shape, dtype=torch.float32, ids=torch.int64, device="cpu", seed=0):
    M, E, K = shape
    ids = torch.uint16 if E > 256 and ids == torch.uint8 else ids
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(M, E, generator=g, dtype=torch.float64).to(dtype)
    experts = torch.rand(M, E, generator=g).topk(K).indices.to(ids)
    grad = torch.randn(M, E, generator=g)
    return scores.to(device), experts.to(device), grad.to(device)


class Given:
    """Gives megatron-core, which asks for the top-k, chosen experts."""

    def __init__(self, ids):
        self.ids = ids

    def get_replay_topk(self, scores, *_):
        return scores.gather(1, self.ids), self.ids


ROUTERS = {  # megatron-core's arguments; scores of the logits, norm
    "sigmoid": (dict(score_function="sigmoid"), torch.sigmoid, "sum"),
    "sigmoid and bias": (dict(score_function="sigmoid", expert_bias=True), torch.sigmoid, "sum"),
    "softmax before": (dict(use_pre_softmax=True), lambda x: torch.softmax(x, -1), "none"),
    "softmax after": ({}, lambda x: x, "softmax"),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("E", [4, 8, 24, 64, 160, 256])
def test_replay_probs_has_the_bits_of_megatron_core(router, E, device):
    from megatron.core.transformer.moe import moe_utils

    route: Any = moe_utils.topk_routing_with_score_function

    options, score, norm = ROUTERS[router]
    if options.get("expert_bias"):
        options = {**options, "expert_bias": torch.randn(E, device=device)}
    for K in range(1, min(E, 9) + 1):
        for M, scale, dtype in ((1, None, torch.float32), (67, 1.8, torch.float32),
                                (50, 2.5, torch.bfloat16)):  # fmt: skip
            logits, ids, grad = case((M, E, K), device=device, seed=K)
            logits = (8 * logits - 4).to(dtype)
            grad = grad.to(dtype)
            theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
            probs, routing_map = route(
                theirs, K, scaling_factor=scale, router_replay=Given(ids), **options
            )
            scores = ours if norm == "softmax" else score(ours.float())
            out = replay_probs(scores, ids, norm, scale, dtype)
            assert torch.equal(out[0], probs) and torch.equal(out[1], routing_map), (M, K)
            assert out[0].dtype == dtype and out[1].dtype == torch.bool
            probs.backward(grad)
            out[0].backward(grad)
            assert ours.grad is not None and theirs.grad is not None
            error = (ours.grad.double() - theirs.grad.double()).abs().max()
            bound = 1e-6 if dtype == torch.float32 else 2**-8
            # a softmax subtracts the mean of its gradients, of one choice the gradient itself: what
            # is left has the rounding of what was subtracted
            taken = 1e-6 * (scale or 1) * float(grad.double().abs().max())
            least = taken if norm == "softmax" else 1e-12
            assert error <= bound * theirs.grad.double().abs().max() + least, (M, K)


@pytest.mark.parametrize("norm", ["none", "sum"])
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_replay_probs_native_has_the_bits_of_torch(shape, norm):
    for dtype, out, ids in zip(FLOATS * 5, FLOATS[1:] * 7, ID_DTYPES * 4, strict=False):
        for scale in (0.0, 1.7):
            scores, experts, grad = case(shape, dtype, ids)
            grad = grad.to(out)
            call = (scores, experts, norm, scale)
            with use_backend("native"):
                probs = op(*call, out)
                grads = grad_op(grad, *call)
            for ours, torchs in zip(probs, reference.replay_probs(*call, out)):
                assert torch.equal(ours, torchs), (dtype, out, ids)
            assert torch.equal(grads, reference.replay_probs_grad(grad, *call)), (dtype, out, ids)


def cuda_order(v):
    """The sum over columns as torch adds it on CUDA from 2.11 on, from single additions: zeros fill
    a power of two, then halves are added to each other."""
    K = v.shape[1]
    v = torch.nn.functional.pad(v, (0, (1 << (K - 1).bit_length()) - K))
    while v.shape[1] > 1:
        v = v[:, : v.shape[1] // 2] + v[:, v.shape[1] // 2 :]
    return v


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replay_probs_cuda_threads_on_the_host_equal_the_reference(shape, norm):
    for dtype, out, ids in zip(FLOATS * 5, FLOATS[1:] * 7, ID_DTYPES * 4, strict=False):
        scores, experts, grad = case(shape, dtype, ids)
        grad = grad.to(out)
        call = (scores, experts, norm, 1.7)
        probs, routing_map = emulated.replay_probs(*call, out)
        expected, expected_map = reference.replay_probs(*call, out)
        assert torch.equal(routing_map, expected_map)
        close = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
        torch.testing.assert_close(probs, expected, rtol=close.get(out, 1e-6), atol=1e-7)
        grads = emulated.replay_probs_grad(grad, *call)
        expected = reference.replay_probs_grad(grad, *call)
        torch.testing.assert_close(grads, expected, rtol=close.get(dtype, 1e-5), atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replay_probs_cuda_threads_add_in_the_order_of_torch(shape):
    scores, experts, _ = case(shape)
    values = scores.gather(1, experts)
    if shape[2] > 1:
        values = values / (cuda_order(values) + 1e-20)
    probs, _ = emulated.replay_probs(scores, experts, "sum", 0.0, torch.float32)
    assert torch.equal(probs.gather(1, experts), values)
    spread = (1e4 * scores).float()  # all but the largest score are 0: no exp, whatever its bits
    spread[0] = 3.0  # and one of equal scores, whose sum is exact
    values = torch.exp((v := spread.gather(1, experts)) - v.amax(1, keepdim=True))
    probs, _ = emulated.replay_probs(spread, experts, "softmax", 0.0, torch.float32)
    values = values / cuda_order(values)
    torch.testing.assert_close(probs.gather(1, experts), values, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_replay_probs_rounds_every_16_bit_number_as_torch(dtype):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(1, -1)
    halves = bits.view(dtype)
    ids = torch.tensor([[0]])
    numbers = halves[~halves.isnan()].view(-1, 1)
    ids = torch.zeros(len(numbers), 1, dtype=torch.uint8)
    for run in (op, emulated.replay_probs):
        wide, _ = run(numbers, ids, "none", 0.0, torch.float32)
        assert torch.equal(wide, numbers.float())
        for shift in (-1, 0, 1):  # around the value, and around halfway to the next one
            middle = (wide + wide.roll(1, 0)) / 2
            for near in (wide, middle[middle.isfinite()].view(-1, 1)):
                moved = (near.view(torch.int32) + shift).view(torch.float32)
                moved = moved[~moved.isnan()].view(-1, 1)
                zeros = torch.zeros(len(moved), 1, dtype=torch.int32)
                back, _ = run(moved, zeros, "none", 0.0, dtype)
                assert torch.equal(back, moved.to(dtype))


def test_replay_probs_takes_rows_at_any_address():
    scores, ids, _ = case((40, 64, 4), ids=torch.uint8)
    expected = reference.replay_probs(scores, ids, "sum", 1.7, torch.float32)
    odd = torch.empty(40 * 64 + 1)[1:].view(40, 64).copy_(scores)
    odd_ids = torch.empty(161, dtype=torch.uint8)[1:].view(40, 4).copy_(ids)
    for run in (native.replay_probs, emulated.replay_probs):
        turned = (scores.T.contiguous().T, ids.T.contiguous().T)  # only native takes strides
        for views in ((odd, odd_ids), turned)[: 2 if run is native.replay_probs else 1]:
            probs, routing_map = run(*views, "sum", 1.7, torch.float32)
            torch.testing.assert_close(probs, expected[0], rtol=1e-6, atol=0)
            assert torch.equal(routing_map, expected[1])
    out = torch.empty(40 * 64 + 1)[1:].view(40, 64)  # written element by element
    routing_map = torch.empty(40 * 64 + 1, dtype=torch.bool)[1:].view(40, 64)
    args = native.arguments(odd, odd_ids, "sum", 1.7, None, out, routing_map)
    C.replay_probs_emulated(args=args, first=0)
    torch.testing.assert_close(out, expected[0], rtol=1e-6, atol=0)
    assert torch.equal(routing_map, expected[1])


@pytest.mark.parametrize("E", [64, 63])
def test_replay_probs_cuda_threads_read_far_behind_the_start(E):
    """Rows behind element 2^33: the tensors' addresses are moved back, so that these are ours."""
    before = (1 << 33) // E // 32 * 32
    M = 70
    scores, ids, grad = case((M, E, 4))
    out = torch.empty(M, E)
    routing_map = torch.empty(M, E, dtype=torch.bool)

    def moved(tensor):
        moved = tensor.data_ptr() - before * tensor.shape[1] * tensor.element_size()
        return moved % (1 << 64)  # as pointers wrap: memory may begin at a low address

    for gradient in (None, grad):
        args = C.ReplayProbsArgs(
            scores=moved(scores),
            scores_dtype=C.DType.f32,
            ids=moved(ids),
            ids_dtype=C.DType.i64,
            rows=before + M,
            experts=E,
            top_k=4,
            norm=C.Norm.sum,
            scale=1.7,
            grad=0 if gradient is None else moved(gradient),
            grad_dtype=C.DType.f32,
            out=moved(out),
            out_dtype=C.DType.f32,
            map=moved(routing_map) if gradient is None else 0,
        )
        C.replay_probs_emulated(args=args, first=before)
        if gradient is None:
            expected = emulated.replay_probs(scores, ids, "sum", 1.7, torch.float32)
            assert torch.equal(out, expected[0]) and torch.equal(routing_map, expected[1])
    assert torch.equal(out, emulated.replay_probs_grad(grad, scores, ids, "sum", 1.7))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), threads=st.sampled_from([1, 2, 5]), norm=st.sampled_from(["none", "sum"]))
def test_replay_probs_equals_a_python_loop(data, threads, norm):
    E = data.draw(st.integers(1, 40))
    M = data.draw(st.sampled_from([0, 1, 31, 33, 700]))
    K = data.draw(st.integers(0, E))
    scores, ids, _ = case((M, E, K), torch.float64, torch.int16, seed=E)
    with on_threads(threads):
        probs, routing_map = replay_probs(scores, ids, norm, 0.5)
    expected = torch.zeros(M, E, dtype=torch.float64)
    for m, row in enumerate(ids.tolist()):
        total = sum(float(scores[m, e]) for e in row) if norm == "sum" and K > 1 else 1.0
        for e in row:
            expected[m, e] = 0.5 * scores[m, e] / total
    torch.testing.assert_close(probs, expected, rtol=1e-14, atol=0)
    assert torch.equal(routing_map, expected != 0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(3, 8, 1), (3, 8, 2), (2, 12, 9), (0, 8, 2), (2, 8, 0)], ids=str)
def test_replay_probs_passes_gradcheck(shape, norm):
    scores, ids, _ = case(shape, torch.float64)
    for backend in ("native", "reference"):
        if backend == "native" and norm == "softmax":
            continue
        with use_backend(backend):
            assert torch.autograd.gradcheck(
                lambda s: replay_probs(s, ids, norm, 1.7)[0], scores.requires_grad_()
            )


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_replay_probs_takes_uint16_ids_of_384_experts(backend):
    scores, ids, grad = case((50, 384, 8), ids=torch.uint16)
    assert (ids.int() > 255).any()
    with use_backend(backend):
        probs, routing_map = replay_probs(scores.requires_grad_(), ids, "sum", 2.5)
        probs.backward(grad)
    wide = scores.detach().clone().requires_grad_()
    expected, expected_map = replay_probs(wide, ids.long(), "sum", 2.5)
    expected.backward(grad)
    assert torch.equal(probs, expected) and torch.equal(routing_map, expected_map)
    assert scores.grad is not None and wide.grad is not None
    assert torch.equal(scores.grad, wide.grad)


def test_replay_probs_gradient_reads_only_chosen_experts():
    scores, ids, _ = case((5, 8, 2))
    probs, routing_map = replay_probs(scores.requires_grad_(), ids, "sum")
    grad = torch.where(routing_map, 1.0, torch.nan)
    probs.backward(grad)
    assert scores.grad is not None and (scores.grad[~routing_map] == 0).all()
    assert scores.grad.isfinite().all() and not routing_map.requires_grad


def test_replay_probs_compiles_without_a_graph_break():
    scores, ids, grad = case((33, 16, 4))

    def run(s):
        probs, routing_map = replay_probs(s.sigmoid(), ids, "sum", 1.5)
        return probs * 2, routing_map.sum(0)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    a, b = (scores.clone().requires_grad_() for _ in range(2))
    for ours, expected in zip(compiled(a), run(b)):
        assert torch.equal(ours, expected)
    compiled(a)[0].backward(grad)
    run(b)[0].backward(grad)
    assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_replay_probs_backends_decline_with_a_reason():
    scores, ids, _ = case((3, 40, 33))
    with use_backend("native"):
        with pytest.raises(NotImplementedError, match="33 of 40 experts, expected at most 32"):
            replay_probs(scores, ids)
        with pytest.raises(NotImplementedError, match="torch's exp on the CPU has other bits"):
            replay_probs(scores, ids[:, :2], "softmax")
    with use_backend("triton"), pytest.raises(NotImplementedError, match="expected cuda"):
        replay_probs(scores, ids)
    assert replay_probs(scores, ids, "sum")[1].sum() == ids.numel()


def triton_equals_reference():
    # the interpreter cuts float32 off where it rounds to bfloat16, so no result is bfloat16 here
    dtypes = [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float64, torch.float64),
    ]
    of_ids = [torch.uint8, torch.uint16, torch.int32, torch.int64]
    for n, shape in enumerate(SHAPES + EMPTY):
        for norm, scale in (("none", 0.0), ("sum", 1.7)):
            (dtype, out), ids = dtypes[n % 4], of_ids[n % 4]
            scores, experts, grad = case(shape, dtype, ids)
            grad = grad.to(out)
            call = (scores, experts, norm, scale)
            with use_backend("triton"):
                probs, routing_map = op(*call, out)
                if dtype != torch.bfloat16:
                    grads = grad_op(grad, *call)
                    expected = reference.replay_probs_grad(grad, *call)
                    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)
            expected, chosen = emulated.replay_probs(*call, out)  # the same order of additions
            assert torch.equal(probs, expected), (shape, norm)
            assert torch.equal(routing_map, chosen), (shape, norm)


@needs_gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_replay_probs_on_a_gpu_has_the_bits_of_torch(shape, norm):
    types = zip(FLOATS * 5, FLOATS[1:] * 7, ID_DTYPES * 4, strict=False)
    for n, (dtype, out, ids) in enumerate(types):
        scores, experts, grad = case(shape, dtype, ids, "cuda")
        grad = grad.to(out)
        call = (scores, experts, norm, 1.7)
        expected = reference.replay_probs(*call, out)
        expected_grad = reference.replay_probs_grad(grad, *call)
        for backend in op.backends[:2]:
            if backend.refuse(*call, out):
                assert backend.name == "triton" and norm == "softmax"
                continue
            if backend.name == "triton" and n % 5:
                continue  # each combination of types is compiled, which takes a second
            for ours, torchs in zip(backend.run(*call, out), expected):
                assert torch.equal(ours, torchs), (backend.name, dtype, out, ids)
            with use_backend(backend.name):
                torch.testing.assert_close(grad_op(grad, *call), expected_grad)
