from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._triton import power_of_two, refuse_device


def refuse(scores: Tensor, ids: Tensor, norm: str, *rest: Any) -> str | None:
    if reason := refuse_device("scores", scores):
        return reason
    if norm == "softmax":
        return "Triton's exp has other bits than torch's"
    if ids.shape[1] > 32 or scores.shape[1] > 1024:
        return f"{ids.shape[1]} of {scores.shape[1]} experts, expected at most 32 of 1024"
    return None


def refuse_grad(grad: Tensor, *call: Any) -> str | None:
    return refuse(*call)


def replay_probs(
    scores: Tensor, ids: Tensor, norm: str, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    probs = scores.new_empty(scores.shape, dtype=out_dtype)
    routing_map = scores.new_empty(scores.shape, dtype=torch.bool)
    _launch(scores, ids, norm, scale, None, probs, routing_map)
    return probs, routing_map


def replay_probs_grad(grad: Tensor, scores: Tensor, ids: Tensor, norm: str, scale: float) -> Tensor:
    out = scores.new_empty(scores.shape)
    _launch(scores, ids, norm, scale, grad.contiguous(), out, None)
    return out


def _launch(
    scores: Tensor,
    ids: Tensor,
    norm: str,
    scale: float,
    grad: Tensor | None,
    out: Tensor,
    routing_map: Tensor | None,
) -> None:
    from .triton_kernel import replay_probs_kernel  # triton takes a while to import

    if out.numel() == 0 or ids.shape[1] == 0:
        for tensor in (out, routing_map):
            if tensor is not None:
                tensor.zero_()
        return
    (M, E), K = scores.shape, ids.shape[1]
    width = power_of_two(E)
    rows = max(1, min(32, 1024 // width))
    kernel: Any = replay_probs_kernel
    kernel[(-(-M // rows),)](
        scores.contiguous(),
        ids.contiguous(),
        grad,
        out,
        routing_map,
        M,
        E,
        K=K,
        SLOTS=power_of_two(K),
        THREADS=1 << (K.bit_length() - 1),
        WIDTH=width,
        ROWS=rows,
        SUM=norm == "sum" and K > 1,
        SCALE=scale,
    )
