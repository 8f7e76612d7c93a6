from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, launch, refuse_device, refuses
from pyrl_ext.ops.tensors import on_gpu

from .reference import new_outputs

MAX_EXPERTS = 512
NAMES = "weights", "rows", "starts", "order", "places", "counts"


def refuse(routing_map: Tensor, probs: Tensor, top_k: int) -> str | None:
    tokens, experts = routing_map.shape
    if experts > MAX_EXPERTS or tokens * top_k >= 2**31:
        return (
            f"{tokens} tokens, {top_k} of {experts} experts, expected at most {MAX_EXPERTS} "
            "experts and 2**31 rows"
        )
    return refuse_device(probs, "expert_rows")


refuse_expert_rows_grad = refuses("expert_rows_grad")


def expert_rows(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, ...]:
    routing_map = routing_map.contiguous()
    probs = probs.contiguous()
    out = new_outputs(probs, top_k)
    args = arguments(routing_map, probs, top_k, out)
    if on_gpu(probs):
        scratch = probs.new_empty(C.expert_rows_scratch(*probs.shape), dtype=torch.int32)
        launch("expert_rows", probs.device, args=args, scratch=scratch.data_ptr())
    else:
        launch("expert_rows", probs.device, args=args)
    return out


def expert_rows_grad(
    grad: Tensor, order: Tensor, places: Tensor, tokens: int, experts: int
) -> Tensor:
    grad = grad.contiguous()
    out = grad.new_empty(tokens, experts)
    args = grad_arguments(grad, order, places, out)
    launch("expert_rows_grad", grad.device, args=args)
    return out


def arguments(routing_map: Tensor, probs: Tensor, top_k: int, out: tuple[Tensor, ...]) -> Any:
    """``C.ExpertRowsArgs`` of contiguous tensors, which it does not keep alive."""
    return C.ExpertRowsArgs(
        map=routing_map.data_ptr(),
        tokens=probs.shape[0],
        experts=probs.shape[1],
        top_k=top_k,
        probs=probs.data_ptr(),
        word=probs.element_size(),
        **{name: each.data_ptr() for name, each in zip(NAMES, out, strict=True)},
    )


def grad_arguments(grad: Tensor, order: Tensor, places: Tensor, out: Tensor) -> Any:
    """``C.ExpertRowsGradArgs`` of contiguous tensors, which it does not keep alive."""
    return C.ExpertRowsGradArgs(
        grad=grad.data_ptr(),
        word=grad.element_size(),
        order=order.data_ptr(),
        places=places.data_ptr(),
        tokens=out.shape[0],
        experts=out.shape[1],
        top_k=len(order) // max(1, len(out)),
        out=out.data_ptr(),
    )
