import os
from importlib.util import find_spec

import torch
from torch import Tensor

from .reference import check


def refuse(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out_dtype: torch.dtype
) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if routes.device != rows.device:
        return f"routes is on {routes.device}, expected rows' {rows.device}"
    if not rows.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"rows is on {rows.device}, expected cuda"
    return None


def gather_routes(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out_dtype: torch.dtype
) -> Tensor:
    """Uploads ``layers``, so a CUDA graph cannot capture it."""
    from .triton_kernel import gather_routes_kernel  # triton takes a while to import

    _, L, K = routes.shape
    check("layers", layers, 0, L, "a slot of routes")
    routes = routes if routes[:1].is_contiguous() else routes.contiguous()
    rows = rows.contiguous()
    out = rows.new_empty((len(layers), len(rows), K), dtype=out_dtype)
    if out.numel() == 0:
        return out
    padded = 1 << (K - 1).bit_length()
    block = max(1, 1024 // padded)
    grid = (-(-len(rows) // block), len(layers))
    slots = layers.to(rows.device, non_blocking=True)
    gather_routes_kernel[grid](
        *(routes, rows, slots, out, routes.stride(0), len(rows), num_experts),
        K=K,  # type: ignore[arg-type]
        PADDED_K=padded,  # type: ignore[arg-type]
        BLOCK=block,  # type: ignore[arg-type]
    )
    return out
