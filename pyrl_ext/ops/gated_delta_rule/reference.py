"""Within chunks of rows by products of matrices, from chunk to chunk by states.

Row i of a chunk adds ``k_i u_i^T`` to the state, where the u solve a triangular system:
``u_i = beta_i (v_i - (what row i reads by k_i of the state before the chunk and of the k_j u_j^T,
j < i, decayed))``. Dimensions: chunk, head, row, then columns.
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


class _Rule:
    """Arguments in chunks, and the state before each: forward and backward need both."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
    ):
        check_boundaries("gated_delta_rule", cu_seqlens, len(q))
        self.wide = accum_dtype(q.dtype)
        self.chunks = chunks_of(cu_seqlens, len(q))
        self.q, self.k, self.v, self.beta = map(self.split, (q, k, v, beta[..., None]))
        self.scale = q.shape[-1] ** -0.5
        self.q = self.q * self.scale
        self.decays = decays = decays_of(self.split(g))
        self.pairs = (self.k @ self.k.mT * decays.inside).tril(-1)
        self.attention = self.q @ self.k.mT * decays.inside
        both = torch.cat([self.v, decays.start * self.k], -1) * self.beta
        both = torch.linalg.solve_triangular(
            self.beta * self.pairs, both, upper=False, unitriangular=True
        )
        # u = own - read @ state before the chunk
        own, self.read = both.split([v.shape[-1], k.shape[-1]], -1)
        self.late = decays.end * self.k
        unit = torch.eye(k.shape[-1], dtype=self.wide, device=k.device)
        self.kept = decays.total * unit - self.late.mT @ self.read
        added = self.late.mT @ own
        self.states = states_before(self.kept, added, self.chunks, torch.matmul)
        self.u = own - self.read @ self.states

    def split(self, x: Tensor) -> Tensor:
        """[T, H, ...] -> [M, H, size, ...]."""
        return self.chunks.split(x, self.wide).movedim(1, 2)

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """The reverse of `split`, in the dtype and the shape of ``like``."""
        return self.chunks.join(x.movedim(2, 1), like.dtype).view(like.shape)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    rule = _Rule(q, k, v, g, beta, cu_seqlens)
    out = rule.attention @ rule.u + rule.decays.start * (rule.q @ rule.states)
    return rule.join(out, v)


def gated_delta_rule_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, ...]:
    rule = _Rule(q, k, v, g, beta, cu_seqlens)
    grad, (start, inside, end, total) = rule.split(grad), rule.decays
    u = rule.attention.mT @ grad
    after = grads_after(
        rule.kept.mT,
        (start * rule.q).mT @ grad - rule.read.mT @ u,
        rule.chunks,
        torch.matmul,
    )
    system = rule.beta * rule.pairs
    of_right = torch.linalg.solve_triangular(
        system.mT, u + rule.late @ after, upper=True, unitriangular=True
    )
    of_v = rule.beta * of_right
    of_system = -(of_right @ rule.u.mT).tril(-1)
    of_pairs = rule.beta * of_system
    of_attention = grad @ rule.u.mT
    scores = of_attention * inside
    keys = of_pairs * inside
    read = start * (rule.k @ rule.states)
    by_q = start * (grad @ rule.states.mT)
    by_k = -start * (of_v @ rule.states.mT)
    late = end * (rule.u @ after.mT)
    logs = Decays(
        (by_q * rule.q + by_k * rule.k).sum(-1, keepdim=True),
        of_attention * rule.attention + of_pairs * rule.pairs,
        (late * rule.k).sum(-1, keepdim=True),
        total * (after * rule.states).sum((-2, -1), keepdim=True),
    )
    of_beta = (of_right * (rule.v - read)).sum(-1) + (of_system * rule.pairs).sum(-1)
    return (
        rule.join((scores @ rule.k + by_q) * rule.scale, q),
        rule.join(scores.mT @ rule.q + (keys + keys.mT) @ rule.k + by_k + late, k),
        rule.join(of_v, v),
        rule.join(logs_grad(logs), g),
        rule.join(of_beta, beta),
    )
