"""squared_relu: a squared ReLU times a weight a row, as routed experts without gates need it.

Backends: reference (torch). Everything is computed in float32 (float64 for float64) and rounded
once. Gradient: to both inputs; it computes the unit again, so only the arguments are kept. There is
no second derivative.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.ops._op import Op
from pyrl_ext.ops.dtypes import accum_dtype

from . import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _grad_fake(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


op = Op("squared_relu(Tensor x, Tensor weight) -> Tensor", fake=_fake)
op.serve(reference)

grad_op = Op(
    "squared_relu_grad(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)", fake=_grad_fake
)
grad_op.serve(reference)


def _backward(ctx, grad):
    return squared_relu_grad(grad, *ctx.saved_tensors)


op.gradient(_backward)


def squared_relu(x: Tensor, weight: Tensor) -> Tensor:
    """``out[n] = relu(x[n])^2 * weight[n]``.

    Args:
        x:      [N, W] float32, bfloat16 or float64.
        weight: [N] float32 (float64 for float64).

    Returns:
        [N, W] dtype of ``x``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _check(x, weight)
    return op(x, weight)


def squared(x: Tensor) -> Tensor:
    """``relu(x)^2`` of any shape, in its dtype, of rows without weights. megatron's function is
    compiled, and anew as microbatches differ in length."""
    return F.relu(x).square()


def squared_relu_grad(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both arguments of `squared_relu`, from that of its result.

    Args:
        grad: [N, W] dtype of ``x``.
        x, weight: as in `squared_relu`.

    Returns:
        [N, W] dtype of ``x``; [N] dtype of ``weight``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _check(x, weight)
    if grad.shape != x.shape or grad.dtype != x.dtype:
        raise ValueError(
            f"squared_relu_grad: grad is {grad.dtype} {list(grad.shape)}, expected {x.dtype} "
            f"{list(x.shape)}"
        )
    return grad_op(grad, x, weight)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"squared_relu: x is {list(x.shape)}, expected [N, W]")
    if x.dtype not in DTYPES:
        raise TypeError(f"squared_relu: x is {x.dtype}, expected one of {list(DTYPES)}")
    wide = accum_dtype(x.dtype)
    if weight.shape != x.shape[:1] or weight.dtype != wide:
        raise ValueError(
            f"squared_relu: weight is {weight.dtype} {list(weight.shape)}, expected {wide} "
            f"[{x.shape[0]}]"
        )
    if weight.device != x.device:
        raise ValueError(
            f"squared_relu: x is on {x.device}, weight on {weight.device}, expected one device"
        )
