# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._op import refuse_dtype
from pyrl_ext.ops._packages import power_of_two

from . import new_grads, new_outputs
from .native import DTYPES, rows_of

TILE = 2048  # elements that a program reads at once, at least a row
WIDEST = 16384  # columns of a row, which a program holds
PARTS = 512  # programs of the gradient at most: each writes a part of the weight's


def refuse(x: Tensor, *_: Any) -> str | None:
    if x.shape[-1] > WIDEST:
        return f"x is {x.shape[-1]} wide, expected at most {WIDEST}"
    return refuse_dtype("x", x, *DTYPES)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, scale = new_outputs(x)
    src, rows, heads, row, head = rows_of(x)
    if out.numel():
        tiles = _tiles(x.shape[-1])
        kernel: Any = rms_norm_fwd_kernel
        kernel[(-(-rows // tiles["TALL"]),)](
            src,
            row,
            head,
            heads,
            weight.contiguous(),
            out,
            scale,
            rows,
            x.shape[-1],
            eps,
            **tiles,
        )
    return out, scale


def rms_norm_grad(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    src, rows, heads, row, head = rows_of(x)
    width = x.shape[-1]
    out, weight_grad = new_grads(grad, x, weight)
    if not out.numel():
        return out, weight_grad.zero_()
    tiles = _tiles(width)
    tall = tiles["TALL"]
    span = -(-rows // (PARTS * tall)) * tall  # rows of a program
    parts = scale.new_empty(-(-rows // span), width)
    kernel: Any = rms_norm_bwd_kernel
    kernel[(len(parts),)](
        grad.contiguous(),
        src,
        row,
        head,
        heads,
        weight.contiguous(),
        scale.contiguous(),
        None if residual_grad is None else residual_grad.contiguous(),
        out,
        parts,
        rows,
        width,
        span,
        **tiles,
    )
    kernel = rms_norm_sum_kernel
    kernel[(-(-width // 32),)](parts, weight_grad, len(parts), width, TALL=64, WIDE=32)
    return out, weight_grad


def _tiles(width: int) -> dict[str, int]:
    wide = power_of_two(width)
    return {"TALL": max(1, TILE // wide), "WIDE": wide, "num_warps": max(4, wide // 512)}


@triton.jit(do_not_specialize=["N", "eps"])
def rms_norm_fwd_kernel(
    x,  # rows read; row n is at n // heads * row + n % heads * head
    row,
    head,
    heads,
    weight,  # [W] read
    out,  # [N, W] written
    scale,  # [N] float32 written
    N,
    W,
    eps,
    TALL: tl.constexpr,  # rows of a program
    WIDE: tl.constexpr,  # a row's columns, and more
):
    n = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    c = tl.arange(0, WIDE)[None, :]
    inside = (n < N) & (c < W)
    v = tl.load(x + n // heads * row + n % heads * head + c, inside, other=0).to(tl.float32)
    s = 1 / tl.sqrt(tl.sum(v * v, 1, keep_dims=True) / W + eps)
    tl.store(scale + n, s, n < N)  # here: later, its address would have to be spilled
    w = tl.load(weight + c, c < W, other=0).to(tl.float32)
    tl.store(out + n * W + c, (v * s * w).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["N", "span"])
def rms_norm_bwd_kernel(
    grad,  # [N, W] read
    x,  # as in the forward kernel
    row,
    head,
    heads,
    weight,  # [W] read
    scale,  # [N] float32 read
    residual_grad,  # [N, W] read, or None: 0
    out,  # [N, W] written
    parts,  # [programs, W] float32 written: the weight's gradient from each program's rows
    N,
    W,
    span,  # rows of a program
    TALL: tl.constexpr,  # rows that it reads at once
    WIDE: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDE)[None, :]
    total = tl.zeros((TALL, WIDE), tl.float32)
    first = p * span
    last = tl.minimum(first + span, N)
    for start in range(first, last, TALL):
        n = start + tl.arange(0, TALL)[:, None]
        inside = (n < last) & (c < W)
        v = tl.load(x + n // heads * row + n % heads * head + c, inside, other=0).to(tl.float32)
        g = tl.load(grad + n * W + c, inside, other=0).to(tl.float32)
        s = tl.load(scale + n, n < last, other=0)
        v = v * s
        total += g * v
        g *= tl.load(weight + c, c < W, other=0).to(tl.float32)  # again: it would take registers
        y = (g - v * (tl.sum(g * v, 1, keep_dims=True) / W)) * s
        if residual_grad is not None:
            y += tl.load(residual_grad + n * W + c, inside, other=0).to(tl.float32)
        tl.store(out + n * W + c, y.to(out.dtype.element_ty), inside)
    tl.store(parts + p * W + tl.arange(0, WIDE), tl.sum(total, 0), tl.arange(0, WIDE) < W)


@triton.jit(do_not_specialize=["P"])
def rms_norm_sum_kernel(
    parts,  # [P, W] float32 read
    out,  # [W] written
    P,
    W,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    c = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, P, TALL):
        p = start + tl.arange(0, TALL)[:, None]
        total += tl.load(parts + p.to(tl.int64) * W + c, (p < P) & (c < W), other=0)
    tl.store(out + c, tl.sum(total, 0).to(out.dtype.element_ty), c < W)
