"""Rows over the root of their mean square, and the gradients: kernels against float64."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pyrl_ext.ops import rms_norm, rms_norm_residual, use_backend
from pyrl_ext.ops._native import C
from pyrl_ext.ops.rms_norm import native, op, reference, reference_grad, rms_norm_grad
from tests.helpers.contract_cases import real
from tests.helpers.threads import on_threads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ISAS = [isa for isa in ("avx512", "avx2", "portable") if C.has_isa(isa)]
SHAPES = [(0, 8), (1, 1), (5, 3), (65, 31), (33, 2, 32), (129, 48), (300, 100), (3, 768), (2, 1001)]
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-6


def case(shape, dtype, device="cpu") -> tuple[Any, ...]:
    """Rows, some of which are tiny and one zero, weight, and the gradients of both results."""
    g = torch.Generator().manual_seed(0)
    x, grad, residual = torch.randn(3, *shape, generator=g, dtype=torch.float64)
    x[1::3] *= 1e-4
    x[2:3] = 0
    weight = 1 + torch.randn(shape[-1], generator=g, dtype=torch.float64)
    return tuple(each.to(device, dtype) for each in (x, weight, grad, residual))


def exact(x, weight, grad, residual) -> list[torch.Tensor]:
    """Output and both gradients by torch in float64."""
    given = (each.detach().double().cpu() for each in (x, weight, grad, residual))
    x, weight, grad, residual = given
    for each in (x, weight):
        each.requires_grad_()
    out = F.rms_norm(x, weight.shape, weight, EPS)
    return [out.detach(), *torch.autograd.grad((out, x * 1), (x, weight), (grad, residual))]


def check(forward, backward, x, weight, grad, residual):
    """Errors at most twice the reference's, plus the rounding of numbers and of a sum's terms."""
    wanted = exact(x, weight, grad, residual)
    ways = []
    for run, back in ((forward, backward), (reference, reference_grad)):
        out, scale = run(x, weight, EPS)
        ways.append([out, *back(grad, x, weight, scale, residual), scale])
    assert [(t.shape, t.dtype) for t in ways[0]] == [(t.shape, t.dtype) for t in ways[1]]
    normed = x.double().cpu() * ways[1][-1].double().cpu()[..., None]
    terms = (grad.double().cpu() * normed).abs().flatten(0, -2).sum(0)
    sizes = *wanted[:2], terms
    for ours, theirs, want, size in zip(*ways, wanted, sizes):
        if want.numel():
            errors = [(t.double().cpu() - want).abs().max() for t in (ours, theirs)]
            assert errors[0] <= 2 * errors[1] + 2e-7 * size.abs().max()


def with_isa(isa):
    return partial(native.rms_norm, isa=isa), partial(native.rms_norm_grad, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_kernels_are_as_exact_as_the_reference(isa, shape):
    for dtype in DTYPES:
        check(*with_isa(isa), *case(shape, dtype))


@needs_gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_on_a_gpu_is_as_exact_as_the_reference(backend, shape):
    with use_backend(backend):
        for dtype in DTYPES:
            check(op, rms_norm_grad, *case(shape, dtype, "cuda"))


def views(dtype=torch.float32):
    """Rows that lie apart: heads of a wider tensor, latents, every second row, columns; expanded
    ones, and what three strides reach."""
    wide = case((12, 2, 60), dtype)[0]
    yield wide[:, :, None, 20:40]
    yield wide[:, :1, 24:48].squeeze(1)
    yield wide[::2, 1]
    yield wide.transpose(0, 2)
    yield wide[:1].expand(5, 2, 60)
    yield wide.unflatten(0, (2, 3, 2))[:, :2, :1, :, 1:50]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_rms_norm_takes_rows_where_they_are(backend):
    for x in views():
        weight = case((x.shape[-1],), x.dtype)[0] + 2
        grad = torch.ones(x.shape)
        with use_backend(backend):
            out, scale = op(x, weight, EPS)
            dense, _ = op(x.contiguous(), weight, EPS)
            ours = rms_norm_grad(grad.expand_as(x), x, weight, scale)
            wanted = rms_norm_grad(grad, x.contiguous(), weight, scale)
        assert out.is_contiguous() and torch.equal(out, dense)
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


def test_rows_of_copies_only_what_takes_three_strides():
    copied = [native.rows_of(x).data.data_ptr() != x.data_ptr() for x in views()]
    assert copied == [False, False, False, True, False, True]


@pytest.mark.parametrize("run", [native.rms_norm, reference])
def test_rms_norm_passes_on_what_is_not_finite(run):
    x = torch.tensor([[float("nan"), 1], [float("inf"), 1], [1, 1]])
    out, _ = run(x, torch.ones(2), EPS)
    assert out[0].isnan().all() and out[1, 0].isnan() and out[2].isfinite().all()


def test_rms_norm_gives_the_same_bits_for_any_number_of_threads():
    x, weight, grad, residual = case((900, 100), torch.float32)
    found = []
    for threads in (1, 3):
        with on_threads(threads):
            out, scale = op(x, weight, EPS)
            found.append([out, scale, *rms_norm_grad(grad, x, weight, scale, residual)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_rms_norm_of_a_row_does_not_depend_on_the_rows_around_it(isa):
    """Bit for bit, forward and backward: alone, in another place, at any address."""
    forward, backward = with_isa(isa)
    for dtype, width in product(DTYPES, (31, 48, 100)):
        x, weight, grad, residual = case((70, width), dtype)
        out, scale = forward(x, weight, EPS)
        slope, _ = backward(grad, x, weight, scale, residual)
        for row in (0, 1, 2, 63, 64, 69):
            room = torch.empty(3 * (width + 1), dtype=dtype).unflatten(0, (3, -1))
            own = [each[:, 1:].copy_(t[row]) for each, t in zip(room[:, None], (x, grad, residual))]
            alone, of_row = forward(own[0], weight, EPS)
            assert torch.equal(alone[0], out[row]) and torch.equal(of_row[0], scale[row])
            assert torch.equal(backward(own[1], own[0], weight, of_row, own[2])[0][0], slope[row])


def test_rms_norm_passes_gradcheck():
    leaves = [x.requires_grad_() for x in (real(4, 2, 6), 1 + real(6))]
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), leaves)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm_residual(x * 1, w, EPS), leaves)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_rms_norm_residual_has_the_gradient_of_each_result_alone_and_of_both(backend):
    x, weight, grad, residual = case((70, 24), torch.float32)
    leaves = x.requires_grad_(), weight.requires_grad_()
    wanted = exact(x, weight, grad, residual)[1:]
    with use_backend(backend):
        out, same = rms_norm_residual(*leaves, EPS)
        assert torch.equal(out, rms_norm(*leaves, EPS)) and torch.equal(same, x)
        both = torch.autograd.grad((out, same), leaves, (grad, residual), retain_graph=True)
        (alone,) = torch.autograd.grad(same, x, residual, retain_graph=True)
        normed = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(alone, residual)
    for ours, parts, want in zip(both, (normed[0] + residual, normed[1]), wanted, strict=True):
        torch.testing.assert_close(ours, parts, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.double(), want, atol=1e-4, rtol=1e-4)


def test_rms_norm_keeps_its_arguments_and_a_number_a_row():
    x, weight = (t.requires_grad_() for t in case((5, 24), torch.float32)[:2])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for run in (rms_norm, rms_norm_residual):
            run(x, weight, EPS)
            assert [t.data_ptr() for t in kept[:2]] == [x.data_ptr(), weight.data_ptr()]
            assert [t.shape for t in kept[2:]] == [(5,)]
            kept.clear()


def triton_equals_reference():
    with use_backend("triton"):
        for shape in [*SHAPES, (2100, 40)]:
            check(op, rms_norm_grad, *case(shape, torch.float32))
        for x in views():
            weight = torch.ones(x.shape[-1])
            check(op, rms_norm_grad, x, weight, torch.ones(x.shape), torch.ones(x.shape))
