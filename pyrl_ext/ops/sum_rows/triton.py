# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._packages import power_of_two
from pyrl_ext.ops.gather_rows.native import rows_of
from pyrl_ext.ops.gather_rows.triton import TILE

from . import new_output


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    src = rows_of(src)
    starts = starts.contiguous()
    order = order.contiguous()
    out = new_output(src, rows, starts, order)
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


@triton.jit(do_not_specialize=["N"])  # a bound
def sum_rows_kernel(
    src,  # [M, C] read, rows `stride` apart
    stride,
    starts,  # [N + 1] int64
    order,  # [M] int64
    out,  # [N, C] written
    N,
    C,
    TALL: tl.constexpr,  # rows of a tile
    WIDE: tl.constexpr,  # columns of a tile
    ACC: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    begin = tl.load(starts + n, n < N, other=0)
    count = tl.load(starts + n + 1, n < N, other=0) - begin
    inside = (n < N)[:, None] & (c < C)[None, :]
    total = tl.zeros((TALL, WIDE), ACC)
    for j in range(tl.max(count, 0)):
        m = tl.load(order + begin + j, j < count, other=0)
        more = inside & (j < count)[:, None]
        term = tl.load(src + m[:, None] * stride + c[None, :], more, other=0)
        total += term.to(ACC)
    tl.store(out + n[:, None] * C + c[None, :], total.to(out.dtype.element_ty), inside)
