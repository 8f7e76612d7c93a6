"""rms_norm: rows divided by the root of their mean square, times a weight a column.

Backends: triton, native (C++ threads with AVX-512, AVX2 or portable code chosen at run time; on
CUDA torch's fused kernels), reference (torch; float64 too). Everything is computed in float32 and
rounded once.
Gradient: to both inputs. It reads rows and gradient once, for the rows' and the weight's, and adds
what reached the rows outside the norm (`rms_norm_residual`). The weight's is a sum over rows in an
order that their number fixes: no atomics, the same bits for any number of threads. There is no
second derivative.

Triton comes first on a GPU: torch's gradient is as many launches, but reads rows and gradient a
second time for the weight's, and what reached the rows otherwise is added by a launch more. Forward
and backward Triton moves 6 times the bytes of the rows, torch 10; without a residual 5 and 7. And
rows apart, such as heads of keys, torch copies first.
"""

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import WIDE_RANGE, Arguments, Like, shapes
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.tensors import accum_dtype

_ARGUMENTS = Arguments("rms_norm", x=("..., W", WIDE_RANGE), weight=("W", Like("x")))
_GRAD_ARGUMENTS = Arguments(
    "rms_norm_grad",
    grad=("..., W", Like("x")),
    x=("..., W", WIDE_RANGE),
    residual_grad=("..., W", Like("x")),
)


def new_outputs(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """An empty result, and one scale a row."""
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accum_dtype(x.dtype))


def new_grads(grad: Tensor, x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Empty gradients of ``x`` and ``weight``."""
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def reference(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _widened(x)
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * scale[..., None] * _widened(weight)).to(x.dtype), scale


def reference_grad(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    normed = _widened(x) * scale[..., None]
    grad = _widened(grad)
    of_normed = grad * _widened(weight)
    mean = (of_normed * normed).mean(-1, keepdim=True)
    out = (of_normed - normed * mean) * scale[..., None]
    if residual_grad is not None:
        out = out + _widened(residual_grad)
    of_weight = (grad * normed).flatten(0, -2).sum(0)
    return out.to(x.dtype), of_weight.to(weight.dtype)


def _widened(values: Tensor) -> Tensor:
    return values.contiguous().to(accum_dtype(values.dtype))


op = Op("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", fake=new_outputs)
op.serve(__name__, "triton", "native")
op.backend("reference", reference)

grad_op = Op(
    "rms_norm_grad(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor? residual_grad)"
    " -> (Tensor, Tensor)",
    fake=new_grads,
)
grad_op.serve(__name__, "triton", "native")
grad_op.backend("reference", reference_grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)  # none of zeros for the scale
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    return (None, None, None) if grad is None else (*rms_norm_grad(grad, *ctx.saved_tensors), None)


op.gradient(_backward, _save)


class _WithResidual(torch.autograd.Function):
    """The norm, and its argument next to it, whose gradient the norm's adds to its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, scale = op(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, residual_grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return residual_grad, None, None
        x, weight, scale = ctx.saved_tensors
        return *rms_norm_grad(grad, x, weight, scale, residual_grad), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``out = x / sqrt(mean(x^2) + eps) * weight``, the mean over the last dimension.

    Args:
        x: [..., W] float32, bfloat16 or float64. Where rows lie at most two strides apart, as heads
            of a wider tensor do, they are read where they are.
        weight: [W] dtype and device of ``x``.
        eps: above 0.

    Returns:
        [..., W] dtype of ``x``, contiguous.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _check(x, weight, eps)
    return op(x, weight, eps)[0]


def rms_norm_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and ``x`` to be used in place of itself: what is computed from it gives its
    gradient to the norm's kernel, which adds both, and autograd adds nothing."""
    _check(x, weight, eps)
    out: tuple[Tensor, Tensor] = _WithResidual.apply(x, weight, eps)  # type: ignore[assignment]
    return out


def rms_norm_grad(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``weight``, from that of `rms_norm`'s result.

    Args:
        grad: [..., W] dtype of ``x``.
        x, weight: as in `rms_norm`.
        scale: [...] float32 (float64 for float64), 1 / sqrt(mean(x^2) + eps).
        residual_grad: [..., W] dtype of ``x``, added to the first gradient; None: 0.

    Returns:
        [..., W] and [W], dtype of ``x``, contiguous.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices of the gradients do not fit.
    """
    _GRAD_ARGUMENTS.check(grad, x, residual_grad)
    return grad_op(grad, x, weight, scale, residual_grad)


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    _ARGUMENTS.check(x, weight)
    if not weight.numel():
        raise ValueError(f"rms_norm: {shapes(x=x, weight=weight)}, expected W at least 1")
    if not eps > 0:
        raise ValueError(f"rms_norm: eps is {eps}, expected a number above 0")
