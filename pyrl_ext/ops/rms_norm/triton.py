from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._triton import power_of_two, refuse_device

from .native import DTYPES, rows_of

TILE = 2048  # elements that a program reads at once, at least a row
WIDEST = 16384  # columns of a row, which a program holds
PARTS = 512  # programs of the gradient at most: each writes a part of the weight's


def refuse(x: Tensor, *_: Any) -> str | None:
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}, expected one of {list(DTYPES)}"
    if x.shape[-1] > WIDEST:
        return f"x is {x.shape[-1]} wide, expected at most {WIDEST}"
    return refuse_device("x", x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from .triton_kernel import rms_norm_fwd_kernel  # triton takes a while to import

    out = x.new_empty(x.shape)
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
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
    from .triton_kernel import rms_norm_bwd_kernel, rms_norm_sum_kernel

    src, rows, heads, row, head = rows_of(x)
    width = x.shape[-1]
    out = x.new_empty(x.shape)
    weight_grad = weight.new_empty(weight.shape)
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
