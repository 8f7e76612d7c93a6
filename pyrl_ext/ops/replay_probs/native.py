from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, address, dtype_of, launch, refuse_device

from . import new_outputs

MAX_TOPK = 32
MAX_EXPERTS = 1 << 16


def refuse(scores: Tensor, ids: Tensor, norm: str, *rest: Any) -> str | None:
    if ids.shape[1] > MAX_TOPK or scores.shape[1] > MAX_EXPERTS:
        return (
            f"{ids.shape[1]} of {scores.shape[1]} experts, expected at most {MAX_TOPK} of "
            f"{MAX_EXPERTS}"
        )
    if norm == "softmax" and scores.device.type == "cpu":
        return "torch's exp on the CPU has other bits than ours"
    return refuse_device(scores, "replay_probs")


def replay_probs(
    scores: Tensor, ids: Tensor, norm: str, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    scores = scores.contiguous()
    ids = ids.contiguous()
    probs, routing_map = new_outputs(scores, ids, norm, scale, out_dtype)
    args = arguments(scores, ids, norm, scale, None, probs, routing_map)
    launch("replay_probs", scores.device, args=args)
    return probs, routing_map


def replay_probs_grad(grad: Tensor, scores: Tensor, ids: Tensor, norm: str, scale: float) -> Tensor:
    grad = grad.contiguous()
    scores = scores.contiguous()
    ids = ids.contiguous()
    out = scores.new_empty(scores.shape)
    args = arguments(scores, ids, norm, scale, grad, out, None)
    launch("replay_probs", scores.device, args=args)
    return out


def arguments(
    scores: Tensor,
    ids: Tensor,
    norm: str,
    scale: float,
    grad: Tensor | None,
    out: Tensor,
    routing_map: Tensor | None,
) -> Any:
    """``C.ReplayProbsArgs`` of contiguous tensors, which it does not keep alive."""
    rows, experts = scores.shape
    return C.ReplayProbsArgs(
        scores=scores.data_ptr(),
        scores_dtype=dtype_of(scores),
        ids=ids.data_ptr(),
        ids_dtype=dtype_of(ids),
        rows=rows,
        experts=experts,
        top_k=ids.shape[1],
        norm=getattr(C.Norm, norm),
        scale=scale,
        grad=address(grad),
        grad_dtype=dtype_of(scores if grad is None else grad),
        out=out.data_ptr(),
        out_dtype=dtype_of(out),
        map=address(routing_map),
    )
