"""Operators along packed sequences, row by row: what their definitions say, and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.ops import causal_conv1d, gated_delta_rule, ssd_scan


@dataclass(frozen=True)
class Along:
    """An operator along sequences.

    Args:
        run:   as its users call it; the last argument is ``cu_seqlens``.
        alone: the same of one sequence, a loop over its rows.
        given: arguments of so many rows, float64; those of ``fixed`` places have no rows.
        wide:  places of the arguments that are float32 with bfloat16.
    """

    run: Callable[..., Tensor]
    alone: Callable[..., Tensor]
    given: Callable[[int, Callable[..., Tensor]], list[Tensor]]
    fixed: tuple[int, ...]
    wide: tuple[int, ...] = ()

    def arguments(self, rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rows)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        wide = torch.promote_types(dtype, torch.float32)
        given = self.given(rows, random)
        return [x.to(wide if n in self.wide else dtype) for n, x in enumerate(given)]

    def part(self, args: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
        """The arguments of some rows."""
        return [x if n in self.fixed else x[begin:end] for n, x in enumerate(args)]

    def exact(self, args: Sequence[Tensor], lengths: Sequence[int], grad: Tensor) -> list[Tensor]:
        """The result and the gradients of all arguments, in float64."""
        leaves = [x.detach().double().requires_grad_() for x in args]
        parts = [self.part(leaves, a, b) for a, b in spans(lengths)]
        out = torch.cat([self.alone(*part) for part in parts])
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]

    def found(self, args: Sequence[Tensor], cu_seqlens: Tensor, grad: Tensor) -> list[Tensor]:
        """The result and the gradients of all arguments by the operator."""
        leaves = [x.detach().requires_grad_() for x in args]
        out = self.run(*leaves, cu_seqlens)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return list(pairwise(ends))


def boundaries(lengths: Sequence[int]) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths; the last one is what they leave of the rows."""
    return torch.tensor([0, *lengths[:-1]]).cumsum(0).int()


def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    width = weight.shape[1]
    out = [x.new_zeros(0, x.shape[1])]
    for t in range(len(x)):
        taps = range(max(0, t - width + 1), t + 1)
        out.append(F.silu(bias + sum(weight[:, width - 1 - t + i] * x[i] for i in taps))[None])
    return torch.cat(out)


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> Tensor:
    B, C = (each.repeat_interleave(x.shape[1] // B.shape[1], 1) for each in (B, C))
    state = x.new_zeros(x.shape[1], B.shape[2], x.shape[2])
    out = [x[:0]]
    for t in range(len(x)):
        s = F.softplus(dt[t] + dt_bias)[:, None, None]
        state = torch.exp(s * A[:, None, None]) * state + s * B[t, :, :, None] * x[t, :, None]
        out.append((C[t, :, None] @ state + D[:, None, None] * x[t, :, None]).mT[None, ..., 0])
    return torch.cat(out)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = q.new_zeros(*q.shape[1:], v.shape[2])
    out = [v[:0]]
    for t in range(len(q)):
        state = g[t].exp()[:, None, None] * state
        missed = v[t, :, None] - k[t, :, None] @ state
        state = state + beta[t, :, None, None] * k[t, :, :, None] * missed
        out.append((q[t, :, None] @ state)[None, :, 0] * q.shape[2] ** -0.5)
    return torch.cat(out)


def _ssd_given(rows: int, random: Callable[..., Tensor]) -> list[Tensor]:
    heads = 4
    groups = 2
    width = 5
    size = 6
    shared = random(rows, groups, size), random(rows, groups, size)
    return [
        random(rows, heads, width),
        random(rows, heads) - 1,
        -random(heads).exp(),
        *shared,
        random(heads),
        random(heads),
    ]


def _delta_given(rows: int, random: Callable[..., Tensor]) -> list[Tensor]:
    heads = 3
    size = 6
    width = 5
    keys = (F.normalize(random(rows, heads, size), dim=-1) for _ in range(2))
    gates = -random(rows, heads).exp(), random(rows, heads).sigmoid()
    return [*keys, random(rows, heads, width), *gates]


ALONG = {
    **{
        f"causal_conv1d, {width} wide": Along(
            causal_conv1d,
            conv,
            lambda rows, random, width=width: [random(rows, 7), random(7, width), random(7)],
            fixed=(1, 2),
        )
        for width in (2, 4)
    },
    "ssd_scan": Along(ssd_scan, ssd, _ssd_given, fixed=(2, 5, 6), wide=(2, 5, 6)),
    "gated_delta_rule": Along(gated_delta_rule, delta_rule, _delta_given, fixed=(), wide=(3,)),
}
