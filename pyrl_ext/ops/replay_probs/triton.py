# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._packages import power_of_two

from . import new_outputs


def refuse(scores: Tensor, ids: Tensor, norm: str, *rest: Any) -> str | None:
    if norm == "softmax":
        return "Triton's exp has other bits than torch's"
    if ids.shape[1] > 32 or scores.shape[1] > 1024:
        return f"{ids.shape[1]} of {scores.shape[1]} experts, expected at most 32 of 1024"
    return None


def replay_probs(
    scores: Tensor, ids: Tensor, norm: str, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    probs, routing_map = new_outputs(scores, ids, norm, scale, out_dtype)
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


@triton.jit
def _sum_of_threads(x, ROWS: tl.constexpr, SLOTS: tl.constexpr, THREADS: tl.constexpr):
    """[ROWS, SLOTS] -> [ROWS, 1], added in the order in which torch reduces on CUDA.

    THREADS of a row take its elements in turn, then those half the number apart are added. A sum
    of two has one order, so the layout that Triton chooses does not matter.
    """
    if SLOTS > THREADS:
        x = tl.sum(tl.reshape(x, (ROWS, 2, THREADS)), 1)
    for level in tl.static_range(5):  # type: ignore[general]
        if THREADS >> level > 1:
            x = tl.sum(tl.reshape(x, (ROWS, 2, THREADS >> (level + 1))), 1)
    return tl.reshape(x, (ROWS, 1))


@triton.jit
def _divide(x, y):
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)  # `/` of float32 is approximate


@triton.jit(do_not_specialize=["M"])  # a bound
def replay_probs_kernel(
    scores,  # [M, E] read at ids
    ids,  # [M, K] integers in [0, E), distinct in a row
    grad,  # [M, E] read at ids; None: the forward pass
    out,  # [M, E] written: probabilities, or the gradient of scores
    routing_map,  # [M, E] bool, written; None with grad
    M,
    E,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # powers of two: from K up,
    THREADS: tl.constexpr,  # up to K,
    WIDTH: tl.constexpr,  # from E up
    ROWS: tl.constexpr,
    SUM: tl.constexpr,  # divide by the sum
    SCALE: tl.constexpr,  # 0: none
):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, SLOTS)[None, :]
    inside = (m < M) & (j < K)
    expert = tl.load(ids + m * K + j, inside, other=0).to(tl.int64)
    value = tl.load(scores + m * E + expert, inside, other=0)
    value = value if value.dtype == tl.float64 else value.to(tl.float32)
    if SUM:
        total = _sum_of_threads(value, ROWS, SLOTS, THREADS) + 1e-20
        total = tl.broadcast_to(total, value.shape)
        share = _divide(value, total)
    else:
        total = value
        share = value
    if grad is not None:
        g = tl.load(grad + m * E + expert, inside, other=0).to(value.dtype)
        if SCALE != 0:
            g = g * SCALE
        if SUM:
            common = _sum_of_threads(-g * _divide(share, total), ROWS, SLOTS, THREADS)
            g = _divide(g, total) + common
        share = g
    elif SCALE != 0:
        share = share * SCALE
    e = tl.arange(0, WIDTH)[None, :]
    dense = tl.zeros((ROWS, WIDTH), share.dtype)
    chosen = tl.zeros((ROWS, WIDTH), tl.int1)
    for i in tl.static_range(K):
        hit = e == tl.sum(tl.where(j == i, expert, 0), 1)[:, None]
        dense = tl.where(hit, tl.sum(tl.where(j == i, share, 0), 1)[:, None], dense)
        chosen = chosen | hit
    here = (m < M) & (e < E)
    if dense.dtype == tl.float64 and out.dtype.element_ty != tl.float64:
        dense = dense.to(tl.float32)  # halves of doubles are rounded twice, as torch does it
    tl.store(out + m * E + e, dense.to(out.dtype.element_ty), here)
    if routing_map is not None:
        tl.store(routing_map + m * E + e, chosen, here)
