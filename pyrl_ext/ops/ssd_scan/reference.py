"""Within chunks of rows by products of matrices, from chunk to chunk by states.

Dimensions: chunk, group, head of the group, row, then columns.
"""

import torch
from torch import Tensor

from pyrl_ext.ops.sequences import (
    Decays,
    check_boundaries,
    chunks_of,
    decays_of,
    grads_after,
    logs_grad,
    states_before,
)
from pyrl_ext.ops.tensors import accum_dtype


class _Scan:
    """Arguments in chunks, and the state before each: forward and backward need both."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor):
        check_boundaries("ssd_scan", cu_seqlens, len(x))
        self.wide = accum_dtype(x.dtype)
        self.groups = B.shape[1]
        self.chunks = chunks_of(cu_seqlens, len(x))
        self.x, self.dt, self.B, self.C = map(self.split, (x, dt[..., None], B, C))
        self.decays = decays_of(self.split(dt * A))
        self.fed = self.x * self.dt
        self.attention = self.C @ self.B.mT * self.decays.inside
        added = (self.B * self.decays.end).mT @ self.fed
        self.states = states_before(self.decays.total, added, self.chunks, torch.mul)

    def split(self, x: Tensor) -> Tensor:
        """[T, H or G, ...] -> [M, G, H / G or 1, size, ...]."""
        return self.chunks.split(x, self.wide).unflatten(2, (self.groups, -1)).movedim(1, 3)

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """The reverse of `split`, in the dtype and the shape of ``like``."""
        return self.chunks.join(x.movedim(3, 1), like.dtype).reshape(like.shape)


def ssd_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, cu_seqlens: Tensor
) -> Tensor:
    scan = _Scan(x, dt, A, B, C, cu_seqlens)
    out = scan.attention @ scan.fed + scan.decays.start * (scan.C @ scan.states)
    return scan.join(out + D.view(scan.groups, -1, 1, 1) * scan.x, x)


def ssd_scan_grad(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, ...]:
    scan = _Scan(x, dt, A, B, C, cu_seqlens)
    grad = scan.split(grad)
    decays = scan.decays
    after = grads_after(decays.total, scan.C.mT @ (decays.start * grad), scan.chunks, torch.mul)
    of_attention = grad @ scan.fed.mT
    scores = (of_attention * decays.inside).sum(2, keepdim=True)
    of_C = decays.start * (grad @ scan.states.mT)  # by states, a head at a time
    of_B = decays.end * (scan.fed @ after.mT)
    fed = scan.attention.mT @ grad + decays.end * (scan.B @ after)
    logs = Decays(
        (of_C * scan.C).sum(-1, keepdim=True),
        of_attention * scan.attention,
        (of_B * scan.B).sum(-1, keepdim=True),
        decays.total * (after * scan.states).sum((-2, -1), keepdim=True),
    )
    of_decay = scan.join(logs_grad(logs), dt)
    return (
        scan.join(fed * scan.dt + D.view(scan.groups, -1, 1, 1) * grad, x),
        scan.join((fed * scan.x).sum(-1), dt) + of_decay * A,
        (of_decay * dt).sum(0),
        scan.join(scores.mT @ scan.C + of_B.sum(2, keepdim=True), B),
        scan.join(scores @ scan.B + of_C.sum(2, keepdim=True), C),
        (grad * scan.x).sum((0, 3, 4)).flatten(),
    )
