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
    return refuse_device(routes, "gather_routes")


def describe(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out: Tensor):
    """The arguments of ``_C.Routes``."""
    T, L, K = routes.shape
    return (
        *(routes.data_ptr(), CODES[routes.dtype], routes.stride(0) * routes.element_size()),
        *(T, L, K, rows.data_ptr(), len(rows), layers.data_ptr(), len(layers), num_experts),
        *(out.data_ptr(), CODES[out.dtype]),
    )


def rows_apart(routes: Tensor) -> Tensor:
    """``routes`` itself where only whole rows are apart in memory (``x[:, a:b]``), else a copy."""
    return routes if routes[:1].is_contiguous() else routes.contiguous()


def gather_routes(
    routes: Tensor,
    rows: Tensor,
    layers: Tensor,
    num_experts: int,
    out_dtype: torch.dtype,
    isa: str = "auto",
) -> Tensor:
    routes, rows, layers = rows_apart(routes), rows.contiguous(), layers.contiguous()
    out = routes.new_empty((len(layers), len(rows), routes.shape[2]), dtype=out_dtype)
    described = C.Routes(*describe(routes, rows, layers, num_experts, out))
    C.gather_routes_cpu(described, isa, threads())
    return out
