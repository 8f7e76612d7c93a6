from __future__ import annotations

import torch
from torch import Tensor

from pyrl_ext.ops._triton import power_of_two, refuses
from pyrl_ext.ops.gather_rows.native import rows_of
from pyrl_ext.ops.gather_rows.triton import TILE

refuse = refuses("src")


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    import triton.language as tl  # triton takes a while to import

    from .triton_kernel import sum_rows_kernel

    src = rows_of(src)
    starts = starts.contiguous()
    order = order.contiguous()
    out = src.new_empty(starts.shape[0] - 1, *src.shape[1:])
    if out.numel() == 0:
        return out
    columns = out[0].numel()
    wide = min(1024, power_of_two(columns))
    tall = min(256, TILE // wide)  # each with a start, an end and a place: registers
    sum_rows_kernel[(-(-len(out) // tall), -(-columns // wide))](
        src,
        src.stride(0),
        starts,
        order,
        out,
        len(out),
        columns,
        TALL=tall,  # type: ignore[arg-type]
        WIDE=wide,  # type: ignore[arg-type]
        ACC=tl.float64 if src.dtype == torch.float64 else tl.float32,  # type: ignore[arg-type]
    )
    return out
