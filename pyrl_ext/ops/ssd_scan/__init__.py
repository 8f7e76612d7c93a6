"""ssd_scan: the scan of a Mamba-2 layer (state space duality) over packed sequences.

Backends: mamba_ssm (the package's Triton kernels, bfloat16, with states and products between chunks
rounded to it), reference (torch, in chunks). The reference computes everything in float32 (float64
for float64) and rounds once. Gradient: to every argument but ``cu_seqlens``; states are computed
again, so only the arguments are kept. There is no second derivative.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.ops._arguments import WIDE_RANGE, Arguments, Like
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.sequences import check_sequences

_CHECKED = Arguments(
    "ssd_scan",
    x=("T, H, P", WIDE_RANGE),
    dt=("T, H", Like("x")),
    A=("H", Like("x", wide=True)),
    B=("T, G, N", Like("x")),
    C=("T, G, N", Like("x")),
    D=("H", Like("x", wide=True)),
    dt_bias=("H", Like("x", wide=True)),
)


def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _grad_fake(grad: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in arguments[:-1])


_ARGUMENTS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor cu_seqlens"
op = Op(f"ssd_scan({_ARGUMENTS}) -> Tensor", fake=_fake)
op.serve(__name__, "mamba_ssm", "reference")

grad_op = Op(
    f"ssd_scan_grad(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_grad_fake,
)
grad_op.serve(__name__, "mamba_ssm", "reference")


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *grad_op(grad, *ctx.saved_tensors), None


op.gradient(_backward)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """``h = exp(s A) h + s B[t] x[t]^T, out[t] = C[t]^T h + D x[t]``, a head at a time.

    s = softplus(dt[t] + dt_bias); h, [N, P], is zero where a sequence begins.

    Args:
        x:          [T, H, P] float32, bfloat16 or float64, rows of packed sequences.
        dt:         [T, H] dtype of ``x``, steps before bias and softplus.
        A:          [H] float32 (float64 for float64), negative.
        B, C:       [T, G, N] dtype of ``x``, shared by H / G neighboring heads.
        D, dt_bias: [H] dtype of ``A``.
        cu_seqlens: [S + 1] int32, boundaries of sequences (`pyrl_ext.ops.sequences`).

    Returns:
        [T, H, P] dtype of ``x``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on a CPU, too, boundaries that
            do not ascend from 0 to at most T.
    """
    _CHECKED.check(x, dt, A, B, C, D, dt_bias)
    heads = x.shape[1]
    groups = B.shape[1]
    if not groups or heads % groups:
        raise ValueError(
            f"ssd_scan: {heads} heads, {groups} groups, expected as many heads in each"
        )
    check_sequences("ssd_scan", x, cu_seqlens)
    return op(x, F.softplus(dt.to(A.dtype) + dt_bias), A, B, C, D, cu_seqlens)
