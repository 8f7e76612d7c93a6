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


def gather_routes(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out_dtype: torch.dtype
) -> Tensor:
    routes, rows, layers = routes.contiguous(), rows.contiguous(), layers.contiguous()
    T, L, K = routes.shape
    out = routes.new_empty((len(layers), len(rows), K), dtype=out_dtype)
    C.gather_routes_cpu(
        *(routes.data_ptr(), CODES[routes.dtype], T, L, K),
        *(rows.data_ptr(), len(rows), layers.data_ptr(), len(layers), num_experts),
        *(out.data_ptr(), CODES[out_dtype], threads()),
    )
    return out
