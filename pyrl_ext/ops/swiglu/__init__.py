"""swiglu: a gated unit times a weight a row, as routed experts need it between their products.

Backends: native (C++ threads with AVX-512, AVX2 or portable code chosen at run time; CUDA), triton,
reference (torch; float64 too). Everything is computed in float32 and rounded once.
Gradient: to both inputs, one kernel; it computes the unit again from ``gate_up``, so nothing else
is kept. The gradient of a weight is a sum over its row in an order that the width fixes. There is
no second derivative.
"""

import torch
from torch import Tensor

from pyrl_ext.ops._op import Op

from . import native, reference, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _fake(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _grad_fake(grad: Tensor, gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), reference.weight_grad_like(gate_up, weight)


op = Op("swiglu(Tensor gate_up, Tensor? weight) -> Tensor", fake=_fake)
op.serve(native, triton, reference)

grad_op = Op(
    "swiglu_grad(Tensor grad, Tensor gate_up, Tensor? weight) -> (Tensor, Tensor)", fake=_grad_fake
)
grad_op.serve(native, triton, reference)


def _backward(ctx, grad):
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
    _check(gate_up, weight)
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
    _check(gate_up, weight)
    expected = gate_up.shape[0], gate_up.shape[1] // 2
    if tuple(grad.shape) != expected or grad.dtype != gate_up.dtype:
        raise ValueError(
            f"swiglu_grad: grad is {grad.dtype} {list(grad.shape)}, expected {gate_up.dtype} "
            f"{list(expected)}"
        )
    return grad_op(grad, gate_up, weight)


def _check(gate_up: Tensor, weight: Tensor | None) -> None:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up is {list(gate_up.shape)}, expected [N, 2 W]")
    if gate_up.dtype not in DTYPES:
        raise TypeError(f"swiglu: gate_up is {gate_up.dtype}, expected one of {list(DTYPES)}")
    if weight is not None:
        wide = torch.promote_types(gate_up.dtype, torch.float32)
        if weight.shape != gate_up.shape[:1] or weight.dtype != wide:
            raise ValueError(
                f"swiglu: weight is {weight.dtype} {list(weight.shape)}, expected {wide} "
                f"[{gate_up.shape[0]}]"
            )
        if weight.device != gate_up.device:
            raise ValueError(
                f"swiglu: gate_up is on {gate_up.device}, weight on {weight.device}, expected one "
                "device"
            )
