"""The kernels of the package fla (flash-linear-attention), which are Triton's."""

import torch
from torch import Tensor

from pyrl_ext.ops._packages import gradients, refuse_package

CHUNK = 64
WIDEST_KEY = 256


def refuse(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> str | None:
    if q.shape[-1] > WIDEST_KEY:
        return f"q has heads of {q.shape[-1]}, expected at most {WIDEST_KEY}"
    return refuse_package("fla", "q", q)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    if not v.numel():
        return v.new_empty(v.shape)
    return _run(*(x[None] for x in (q, k, v, g, beta)), *boundaries(cu_seqlens, len(q)))[0]


def gated_delta_rule_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, ...]:
    arguments = q, k, v, g, beta
    if not v.numel():
        return tuple(torch.zeros_like(x) for x in arguments)
    given = boundaries(cu_seqlens, len(q))
    leaves = [x.contiguous()[None] for x in arguments]
    found = gradients(lambda *x: _run(*x, *given), leaves, grad.contiguous()[None])
    return tuple(each[0] for each in found)


def _run(*given: Tensor) -> Tensor:
    """Calls fla with q, k, v, g, beta, each [1, T, ...], and both `boundaries`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    *rows, ends, chunks = given
    out, _ = chunk_gated_delta_rule(*rows, cu_seqlens=ends, chunk_indices=chunks, chunk_size=CHUNK)
    return out


def boundaries(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Boundaries that end with the rows, and the chunks: what fla would read from the device.

    Returns:
        [S + 2] int32; [M, 2] int32, sequence and number of each chunk. M is as many as there may
        be, for any lengths; what is too many is behind the last one's end, where there are no rows.
    """
    ends = torch.cat([cu_seqlens, cu_seqlens.new_tensor([rows])])
    counts = (ends.diff() + CHUNK - 1) // CHUNK
    after = counts.cumsum(0)
    most = (rows + (CHUNK - 1) * len(counts)) // CHUNK
    slots = torch.arange(most, device=ends.device)
    sequence = torch.searchsorted(after, slots, right=True).clamp(max=len(counts) - 1)
    chunk = slots - (after - counts)[sequence]
    return ends, torch.stack([sequence, chunk], 1).int()
