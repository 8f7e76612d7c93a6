# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._packages import power_of_two
from pyrl_ext.ops.tensors import to_device

from . import check_entries, new_output
from .native import rows_apart


def gather_routes(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int) -> Tensor:
    """Uploads ``layers``, so a CUDA graph cannot capture it."""
    _, L, K = routes.shape
    check_entries("layers", layers, 0, L, "a slot of routes")
    routes = routes if rows_apart(routes) else routes.contiguous()
    rows = rows.contiguous()
    out = new_output(routes, rows, layers, num_experts)
    if out.numel() == 0:
        return out
    padded = power_of_two(K)
    block = max(1, 1024 // padded)
    grid = (-(-len(rows) // block), len(layers))
    slots = to_device(layers, rows.device)
    gather_routes_kernel[grid](
        routes,
        rows,
        slots,
        out,
        routes.stride(0),
        len(rows),
        num_experts,
        K=K,  # type: ignore[arg-type]
        PADDED_K=padded,  # type: ignore[arg-type]
        BLOCK=block,  # type: ignore[arg-type]
    )
    return out


@triton.jit
def gather_routes_kernel(
    routes,  # [T, L, K] read; row_stride: elements from one row to the next
    rows,  # [M] int64, -1 or a row of routes
    slots,  # [l] int64
    out,  # [l, M, K] written
    row_stride,
    M,
    num_experts,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, PADDED_K)[None, :]
    layer = tl.program_id(1).to(tl.int64)
    inside = (m < M) & (j < K)
    row = tl.load(rows + m, m < M, other=-1)
    slot = tl.load(slots + layer)
    expert = tl.load(routes + row * row_stride + slot * K + j, inside & (row >= 0), other=0)
    fill = (m * K + j) % num_experts
    value = tl.where(row >= 0, expert.to(tl.int64), fill)
    tl.store(out + (layer * M + m) * K + j, value.to(out.dtype.element_ty), inside)
