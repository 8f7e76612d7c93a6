"""A gated unit times a weight a row, and its gradient: kernels against float64."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pyrl_ext.ops import swiglu, use_backend
from pyrl_ext.ops._native import C
from pyrl_ext.ops.swiglu import native, reference, reference_grad, swiglu_grad
from tests.helpers import emulated
from tests.helpers.threads import on_threads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ISAS = [isa for isa in ("avx512", "avx2", "portable") if C.has_isa(isa)]
SHAPES = [(0, 8), (1, 1), (5, 3), (2, 31), (33, 32), (9, 48), (4, 100), (3, 768), (2, 1001)]
DTYPES = (torch.float32, torch.bfloat16)


def case(shape, dtype, weighted=True, device="cpu") -> tuple[Any, Any, Any]:
    """Gates and ups, weight and gradient; gates reach from where exp overflows to where it is 0."""
    rows, width = shape
    g = torch.Generator().manual_seed(0)
    gate_up = torch.randn(rows, 2 * width, generator=g, dtype=torch.float64)
    gate_up[::2, : width // 2] *= 40
    weight = torch.rand(rows, generator=g) if weighted else None
    grad = torch.randn(rows, width, generator=g, dtype=torch.float64)
    weight = None if weight is None else weight.to(device)
    return gate_up.to(device, dtype), weight, grad.to(device, dtype)


def exact(gate_up, weight, grad):
    """Output, and gradients of gates and ups, and of weights, by autograd in float64."""
    gate_up = gate_up.detach().double().cpu().requires_grad_()
    factor = torch.ones(len(gate_up)) if weight is None else weight.detach().cpu()
    factor = factor.double().requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    out = F.silu(gate) * up * factor[:, None]
    return out.detach(), *torch.autograd.grad(out, (gate_up, factor), grad.double().cpu())


def magnitudes(gate_up, grad):
    """The absolute numbers that the gradient of a row's weight adds, added."""
    gate, up = gate_up.double().cpu().chunk(2, -1)
    return (grad.double().cpu() * F.silu(gate) * up).abs().sum(-1)


def errors(found, wanted):
    return [
        (a.double().cpu() - b).abs().max().item() if b.numel() else 0 for a, b in zip(found, wanted)
    ]


def check(forward, backward, gate_up, weight, grad):
    """Errors at most twice the reference's, plus the rounding of numbers and of a sum's terms."""
    wanted = exact(gate_up, weight, grad)
    found = [forward(gate_up, weight), *backward(grad, gate_up, weight)]
    want = [reference(gate_up, weight), *reference_grad(grad, gate_up, weight)]
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in want]
    if weight is None:
        found = found[:2]
        want = want[:2]
    sizes = *wanted[:2], magnitudes(gate_up, grad)
    for ours, theirs, size in zip(errors(found, wanted), errors(want, wanted), sizes):
        largest = size.abs().max().item() if size.numel() else 0
        assert ours <= 2 * theirs + 2e-7 * max(1, largest)


def with_isa(isa):
    return partial(native.swiglu, isa=isa), partial(native.swiglu_grad, isa=isa)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(emulated.swiglu, emulated.swiglu_grad), *map(with_isa, ISAS)],
    ids=["emulated", *ISAS],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_kernels_are_as_exact_as_the_reference(forward, backward, shape):
    for dtype in DTYPES:
        for weighted in (True, False):
            check(forward, backward, *case(shape, dtype, weighted))


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_on_a_gpu_is_as_exact_as_the_reference(backend, shape):
    with use_backend(backend):
        for dtype in DTYPES:
            for weighted in (True, False):
                check(swiglu, swiglu_grad, *case(shape, dtype, weighted, "cuda"))


@needs_gpu
def test_swiglu_takes_any_alignment_on_a_gpu():
    gate_up, weight, grad = case((9, 48), torch.bfloat16, device="cuda")
    moved = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (gate_up, grad)]
    with use_backend("native"):
        assert torch.equal(swiglu(moved[0], weight), swiglu(gate_up, weight))
        ours = swiglu_grad(moved[1], moved[0], weight)
        for a, b in zip(ours, swiglu_grad(grad, gate_up, weight), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("run", [emulated.swiglu, native.swiglu])
def test_swiglu_passes_on_what_is_not_finite(run):
    gate_up = torch.tensor([[float("nan"), 1], [1, float("nan")], [float("inf"), 1], [-1e4, 1]])
    out = run(gate_up, torch.ones(4))
    assert out[:2].isnan().all() and out[2] == float("inf") and abs(out[3]) < 1e-30
    ours, of_weight = native.swiglu_grad(torch.ones(4, 1), gate_up, torch.ones(4))
    assert ours[0, 0].isnan() and ours[0, 1].isnan() and ours[1, 0].isnan()
    assert of_weight[:2].isnan().all()


def test_swiglu_gives_the_same_bits_for_any_number_of_threads_and_rows():
    gate_up, weight, grad = case((400, 100), torch.float32)
    found = []
    for threads in (1, 3):
        with on_threads(threads):
            found.append([swiglu(gate_up, weight), *swiglu_grad(grad, gate_up, weight)])
    alone = swiglu_grad(grad[7:8], gate_up[7:8], weight[7:8])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(alone[0][0], found[0][1][7]) and torch.equal(alone[1][0], found[0][2][7])


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_passes_gradcheck(weighted):
    gate_up, weight, _ = case((4, 6), torch.float64, weighted)
    leaves = [(gate_up / 10).requires_grad_()]
    leaves += [weight.double().requires_grad_()] if weighted else []
    assert torch.autograd.gradcheck(swiglu, leaves)


@pytest.mark.parametrize("shape", [(5, 24), (3, 0), (0, 6)], ids=str)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_swiglu_takes_the_gradient_of_a_sum(backend, shape):
    """It is one number, expanded: its strides are 0."""
    gate_up, weight, _ = case(shape, torch.float32)
    leaves = gate_up.requires_grad_(), weight.requires_grad_()
    with use_backend(backend):
        found = torch.autograd.grad(swiglu(*leaves).sum(), leaves)
    wanted = exact(gate_up, weight, torch.ones(shape))
    for ours, want in zip(found, wanted[1:], strict=True):
        torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)


def test_swiglu_keeps_its_arguments_alone():
    gate_up, weight, _ = case((5, 24), torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate_up.requires_grad_(), weight)
    assert {t.data_ptr() for t in kept} == {gate_up.data_ptr(), weight.data_ptr()}


def triton_equals_reference():
    for shape in SHAPES:
        for weighted in (True, False):
            gate_up, weight, grad = case(shape, torch.float32, weighted)
            with use_backend("triton"):
                check(swiglu, swiglu_grad, gate_up, weight, grad)
