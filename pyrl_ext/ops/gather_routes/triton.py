from __future__ import annotations

from torch import Tensor

from pyrl_ext.ops._triton import power_of_two, refuse_device
from pyrl_ext.ops.to_device import to_device

from .reference import check


def refuse(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int) -> str | None:
    return refuse_device("rows", rows)


def gather_routes(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int) -> Tensor:
    """Uploads ``layers``, so a CUDA graph cannot capture it."""
    from .triton_kernel import gather_routes_kernel  # triton takes a while to import

    _, L, K = routes.shape
    check("layers", layers, 0, L, "a slot of routes")
    routes = routes if routes[:1].is_contiguous() else routes.contiguous()
    rows = rows.contiguous()
    out = routes.new_empty((len(layers), len(rows), K))
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
