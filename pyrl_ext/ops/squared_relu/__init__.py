"""squared_relu: a squared ReLU times a weight a row, as routed experts without gates need it.

Backends: reference (torch). Everything is computed in float32 (float64 for float64) and rounded
once. Gradient: to both inputs; it computes the unit again, so only the arguments are kept. There is
no second derivative.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.ops._arguments import WIDE_RANGE, Arguments, Like
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.tensors import accum_dtype

_DECLARED = {"x": ("N, W", WIDE_RANGE), "weight": ("N", Like("x", wide=True))}
_ARGUMENTS = Arguments("squared_relu", **_DECLARED)
_GRAD_ARGUMENTS = Arguments("squared_relu_grad", grad=("N, W", Like("x")), **_DECLARED)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _grad_fake(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    positive = F.relu(x.to(accum_dtype(x.dtype)))
    return (positive.square() * weight[:, None]).to(x.dtype)


def reference_grad(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = accum_dtype(x.dtype)
    grad = grad.to(wide)
    positive = F.relu(x.to(wide))
    of_x = 2 * grad * positive * weight[:, None]
    return of_x.to(x.dtype), (grad * positive.square()).sum(-1)


op = Op("squared_relu(Tensor x, Tensor weight) -> Tensor", fake=_fake)
op.backend("reference", reference)

grad_op = Op(
    "squared_relu_grad(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)", fake=_grad_fake
)
grad_op.backend("reference", reference_grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
    _ARGUMENTS.check(x, weight)
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
    _GRAD_ARGUMENTS.check(grad, x, weight)
    return grad_op(grad, x, weight)
