"""swiglu: a gated unit times a weight a row, as routed experts need it between their products.

Backends: native (C++ threads with AVX-512, AVX2 or portable code chosen at run time; CUDA), triton,
reference (torch; float64 too). Everything is computed in float32 and rounded once.
Gradient: to both inputs, one kernel; it computes the unit again from ``gate_up``, so nothing else
is kept. The gradient of a weight is a sum over its row in an order that the width fixes. There is
no second derivative.
"""

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import WIDE_RANGE, Arguments, Like
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.tensors import accum_dtype

_DECLARED = {"gate_up": ("N, 2 W", WIDE_RANGE), "weight": ("N", Like("gate_up", wide=True))}
_ARGUMENTS = Arguments("swiglu", **_DECLARED)
_GRAD_ARGUMENTS = Arguments("swiglu_grad", grad=("N, W", Like("gate_up")), **_DECLARED)


def new_output(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    """An empty result."""
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def new_grads(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty gradients; without a weight its own has no elements."""
    if weight is None:
        return gate_up.new_empty(gate_up.shape), gate_up.new_empty(0, dtype=torch.float32)
    return gate_up.new_empty(gate_up.shape), torch.empty_like(weight)


def reference(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    gate, up = _widened(gate_up).chunk(2, -1)
    out = gate * torch.sigmoid(gate) * up
    return (out if weight is None else out * weight[:, None]).to(gate_up.dtype)


def reference_grad(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    gate, up = _widened(gate_up).chunk(2, -1)
    grad = _widened(grad)
    s = torch.sigmoid(gate)
    silu = gate * s
    both = grad if weight is None else grad * weight[:, None]
    grads = torch.cat([both * up * (s + silu * (1 - s)), both * silu], -1).to(gate_up.dtype)
    if weight is None:
        return grads, gate_up.new_empty(0, dtype=torch.float32)
    return grads, (grad * (silu * up)).sum(-1)


def _widened(values: Tensor) -> Tensor:
    return values.to(accum_dtype(values.dtype))


op = Op("swiglu(Tensor gate_up, Tensor? weight) -> Tensor", fake=new_output)
op.serve(__name__, "native", "triton")
op.backend("reference", reference)

grad_op = Op(
    "swiglu_grad(Tensor grad, Tensor gate_up, Tensor? weight) -> (Tensor, Tensor)", fake=new_grads
)
grad_op.serve(__name__, "native", "triton")
grad_op.backend("reference", reference_grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, weight = ctx.saved_tensors
    grads, weight_grad = swiglu_grad(grad, gate_up, weight)
    return grads, None if weight is None else weight_grad


op.gradient(_backward)


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """``out[n] = silu(gate_up[n, :W]) * gate_up[n, W:] * weight[n]``.

    Args:
        gate_up: [N, 2 W] float32, bfloat16 or float64, gates before ups.
        weight:  [N] float32 (float64 for float64); None: 1.

    Returns:
        [N, W] dtype of ``gate_up``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _ARGUMENTS.check(gate_up, weight)
    return op(gate_up, weight)


def swiglu_grad(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of both arguments of `swiglu`, from that of its result.

    Args:
        grad: [N, W] dtype of ``gate_up``.
        gate_up, weight: as in `swiglu`.

    Returns:
        [N, 2 W] dtype of ``gate_up``; [N] dtype of ``weight``, or [0] without one.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _GRAD_ARGUMENTS.check(grad, gate_up, weight)
    return grad_op(grad, gate_up, weight)
