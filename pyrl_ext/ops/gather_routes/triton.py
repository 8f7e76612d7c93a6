from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrl_ext.ops._triton import Launch, meta, refuse_device
from pyrl_ext.ops.dtypes import dtype_of
from pyrl_ext.ops.to_device import to_device
from pyrl_ext.plan.model.route_ids import route_id_dtype

from .reference import check

if TYPE_CHECKING:
    from pyrl_ext.plan import Plan


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
    padded = 1 << (K - 1).bit_length()
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


def launches(plan: Plan, config: Mapping[str, Any]) -> Iterator[Launch]:
    """The launches of a run of ``plan``: one per number of layers that a rank's routes span."""
    if not plan.router_layers:
        return
    top_k = plan.sizes.topk
    experts = plan.sizes.num_experts
    dtype = route_id_dtype(experts)
    spans = {1}  # padding, where nothing is replayed
    for stage in plan.stages:
        routed = [i for chunk in stage for i in chunk.layers if i in plan.router_layers]
        first = plan.router_layers.index(routed[0]) if routed else 0
        spans.add(plan.router_layers.index(routed[-1]) - first + 1 if routed else 1)
    for span in sorted(spans):

        def gather(rows: int, span: int = span) -> Tensor:
            routes = meta(rows, span, top_k, dtype=dtype_of(dtype))
            layers = torch.zeros(1, dtype=torch.int64)
            return gather_routes(routes, meta(rows, dtype=torch.int64), layers, experts)

        yield f"gather_routes {dtype} {span} x {top_k} of {experts}", gather
