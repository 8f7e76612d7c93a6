from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads

CODES = {  # enum class Int of gather_routes.hpp
    torch.uint8: 0,
    torch.uint16: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
}


def refuse(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out_dtype: torch.dtype
) -> str | None:
    reason = refuse_device(rows, "gather_routes")
    if reason or not rows.is_cuda:
        return reason
    if (tuple_bytes := routes.shape[2] * routes.element_size()) > 1 << 14:
        return f"the experts of a token and layer take {tuple_bytes} bytes, expected at most 16384"
    if layers.numel() and (slot := int(layers.max())) >= 1 << 15:
        return f"a slot is {slot}, expected below 32768"
    if not routes.is_cuda and not (routes.is_pinned() and rows_apart(routes)):
        return "routes is in host memory, expected it pinned and contiguous within a token"
    return None


def rows_apart(routes: Tensor) -> bool:
    """Whether only whole rows are apart in memory, as in ``x[:, a:b]``."""
    return routes[:1].is_contiguous()


def describe(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out: Tensor
) -> tuple[Any, ...]:
    """The arguments of ``_C.Routes``."""
    row_bytes = routes.stride(0) * routes.element_size()
    return (
        *(routes.data_ptr(), CODES[routes.dtype], row_bytes, *routes.shape),
        *(rows.data_ptr(), len(rows), layers.data_ptr(), len(layers), num_experts),
        *(out.data_ptr(), CODES[out.dtype]),
    )


def gather_routes(
    routes: Tensor,
    rows: Tensor,
    layers: Tensor,
    num_experts: int,
    out_dtype: torch.dtype,
    isa: str = "auto",
) -> Tensor:
    rows, layers = rows.contiguous(), layers.contiguous()
    routes = routes if rows_apart(routes) else routes.contiguous()
    out = rows.new_empty((len(layers), len(rows), routes.shape[2]), dtype=out_dtype)
    call = C.Routes(*describe(routes, rows, layers, num_experts, out))
    if rows.is_cuda:
        with torch.cuda.device(rows.device):
            C.gather_routes_cuda(call, torch.cuda.current_stream().cuda_stream)
    else:
        C.gather_routes_cpu(call, isa, threads())
    return out
