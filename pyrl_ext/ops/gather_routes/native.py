from typing import Any

from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, launch, refuse_device
from pyrl_ext.ops.tensors import on_gpu

from . import new_output


def refuse(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int) -> str | None:
    reason = refuse_device(rows, "gather_routes")
    if reason or not on_gpu(rows):
        return reason
    if (tuple_bytes := routes.shape[2] * routes.element_size()) > 1 << 14:
        return f"the experts of a token and layer take {tuple_bytes} bytes, expected at most 16384"
    if layers.numel() and (slot := int(layers.max())) >= 1 << 15:
        return f"a slot is {slot}, expected below 32768"
    return None


def rows_apart(routes: Tensor) -> bool:
    """True if each row is contiguous, as in ``x[:, a:b]``; rows may lie any stride apart."""
    return routes[:1].is_contiguous()


def arguments(routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, out: Tensor) -> Any:
    """``C.GatherRoutesArgs``; every tensor but ``routes`` is contiguous."""
    num_src, num_slots, top_k = routes.shape
    return C.GatherRoutesArgs(
        routes=routes.data_ptr(),
        dtype=dtype_of(routes),
        row_bytes=routes.stride(0) * routes.element_size(),
        num_src=num_src,
        num_slots=num_slots,
        top_k=top_k,
        rows=rows.data_ptr(),
        num_out=len(rows),
        layers=layers.data_ptr(),
        num_layers=len(layers),
        num_experts=num_experts,
        out=out.data_ptr(),
    )


def gather_routes(
    routes: Tensor, rows: Tensor, layers: Tensor, num_experts: int, isa: str = "auto"
) -> Tensor:
    rows = rows.contiguous()
    layers = layers.contiguous()
    routes = routes if rows_apart(routes) else routes.contiguous()
    out = new_output(routes, rows, layers, num_experts)
    args = arguments(routes, rows, layers, num_experts, out)
    launch("gather_routes", rows.device, isa, args=args)
    return out
