"""ssd_scan: the scan of a Mamba-2 layer (state space duality) over packed sequences.

Backends: mamba_ssm (the package's Triton kernels, bfloat16, with states and products between chunks
rounded to it), reference (torch, in chunks). The reference computes everything in float32 (float64
for float64) and rounds once. Gradient: to every argument but ``cu_seqlens``; states are computed
again, so only the arguments are kept. There is no second derivative.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.ops._op import Op
from pyrl_ext.ops.dtypes import accum_dtype
from pyrl_ext.ops.sequences import check_sequences

from . import mamba, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _grad_fake(grad: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in arguments[:-1])


_ARGUMENTS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor cu_seqlens"
op = Op(f"ssd_scan({_ARGUMENTS}) -> Tensor", fake=_fake)
op.backend("mamba_ssm", mamba.ssd_scan, refuse=mamba.refuse)
op.backend("reference", reference.ssd_scan)

grad_op = Op(
    f"ssd_scan_grad(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_grad_fake,
)
grad_op.backend("mamba_ssm", mamba.ssd_scan_grad, refuse=mamba.refuse_grad)
grad_op.backend("reference", reference.ssd_scan_grad)


def _backward(ctx, grad):
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
        B, C:       [T, G, N] dtype of ``x``, shared by H / G neighbouring heads.
        D, dt_bias: [H] dtype of ``A``.
        cu_seqlens: [S + 1] int32, boundaries of sequences (`pyrl_ext.ops.sequences`).

    Returns:
        [T, H, P] dtype of ``x``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on a CPU, too, boundaries that
            do not ascend from 0 to at most T.
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
    _check(given)
    check_sequences("ssd_scan", x, cu_seqlens)
    return op(x, F.softplus(dt.to(A.dtype) + dt_bias), A, B, C, D, cu_seqlens)


def _check(given: dict[str, Tensor]) -> None:
    shapes = {name: list(each.shape) for name, each in given.items()}
    x = shapes["x"]
    B = shapes["B"]
    heads = x[1:2]
    if (
        not len(x) == len(B) == 3
        or B[:1] != x[:1]
        or shapes["C"] != B
        or shapes["dt"] != x[:2]
        or not shapes["A"] == shapes["D"] == shapes["dt_bias"] == heads
    ):
        raise ValueError(
            f"ssd_scan: {shapes}, expected x [T, H, P], dt [T, H], B and C [T, G, N], "
            "the others [H]"
        )
    if not B[1] or x[1] % B[1]:
        raise ValueError(f"ssd_scan: {x[1]} heads, {B[1]} groups, expected as many heads in each")
    dtype = given["x"].dtype
    wide = accum_dtype(dtype)
    dtypes = {name: each.dtype for name, each in given.items()}
    expected = {name: wide if name in ("A", "D", "dt_bias") else dtype for name in given}
    if dtype not in DTYPES or dtypes != expected:
        raise TypeError(
            f"ssd_scan: {dtypes}, expected one of {list(DTYPES)} for x, dt, B and C, and float32, "
            "or float64 with float64, for A, D and dt_bias"
        )
    devices = {name: str(each.device) for name, each in given.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"ssd_scan: {devices}, expected one device")
