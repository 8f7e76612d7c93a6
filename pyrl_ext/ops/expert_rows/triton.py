from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._triton import refuse_device, refuses

from .reference import new_outputs

MAX_EXPERTS = 1024


def refuse(routing_map: Tensor, probs: Tensor, top_k: int) -> str | None:
    tokens, experts = routing_map.shape
    if experts > MAX_EXPERTS or tokens * top_k >= 2**31:
        return (
            f"{tokens} tokens, {top_k} of {experts} experts, expected at most {MAX_EXPERTS} "
            "experts and 2**31 rows"
        )
    return refuse_device("probs", probs)


refuse_grad = refuses("grad")


def expert_rows(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, ...]:
    from .triton_kernel import expert_rows_count_kernel, expert_rows_kernel, tiles

    routing_map = routing_map.contiguous()
    probs = probs.contiguous()
    tokens, experts = probs.shape
    out = new_outputs(probs, top_k)
    sizes = tiles(experts)
    number = max(1, -(-tokens // 256))
    per_tile = probs.new_empty(number, experts, dtype=torch.int32)
    count: Any = expert_rows_count_kernel
    count[(number,)](routing_map, per_tile, tokens, experts, **sizes)
    place: Any = expert_rows_kernel
    place[(number,)](
        routing_map,
        probs,
        per_tile,
        *out,
        tokens,
        experts,
        top_k,
        number,
        CHUNK=1024 // sizes["WIDTH"],
        **sizes,
    )
    return out


def expert_rows_grad(
    grad: Tensor, order: Tensor, places: Tensor, tokens: int, experts: int
) -> Tensor:
    from .triton_kernel import expert_rows_grad_kernel, tiles

    out = grad.new_empty(tokens, experts)
    if tokens:
        sizes = tiles(experts)
        kernel: Any = expert_rows_grad_kernel
        kernel[(-(-tokens // sizes["TALL"]),)](
            grad.contiguous(),
            order,
            places,
            out,
            tokens,
            experts,
            K=len(order) // tokens,
            TALL=sizes["TALL"],
            WIDTH=sizes["WIDTH"],
        )
    return out
