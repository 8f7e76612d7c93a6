from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, refuse_device, threads
from pyrl_ext.ops.on_gpu import on_gpu

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


def refuse_grad(grad: Tensor, *call: Any) -> str | None:
    return refuse(*call)


def replay_probs(
    scores: Tensor, ids: Tensor, norm: str, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    scores = scores.contiguous()
    ids = ids.contiguous()
    probs = scores.new_empty(scores.shape, dtype=out_dtype)
    routing_map = scores.new_empty(scores.shape, dtype=torch.bool)
    _run(arguments(scores, ids, norm, scale, None, probs, routing_map), scores)
    return probs, routing_map


def replay_probs_grad(grad: Tensor, scores: Tensor, ids: Tensor, norm: str, scale: float) -> Tensor:
    grad = grad.contiguous()
    scores = scores.contiguous()
    ids = ids.contiguous()
    out = scores.new_empty(scores.shape)
    _run(arguments(scores, ids, norm, scale, grad, out, None), scores)
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
        grad=0 if grad is None else grad.data_ptr(),
        grad_dtype=dtype_of(scores if grad is None else grad),
        out=out.data_ptr(),
        out_dtype=dtype_of(out),
        map=0 if routing_map is None else routing_map.data_ptr(),
    )


def _run(args: Any, scores: Tensor) -> None:
    if on_gpu(scores):
        with torch.cuda.device(scores.device):
            C.replay_probs_cuda(args=args, stream=torch.cuda.current_stream().cuda_stream)
    else:
        C.replay_probs_cpu(args=args, threads=threads())
