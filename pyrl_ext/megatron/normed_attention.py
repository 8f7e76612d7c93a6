"""Attention whose queries, and keys, are normalized over all heads together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from pyrl_ext.megatron.local_layers import RMSNorm, TurnedAttention, sharded_weight
from pyrl_ext.ops.tensors import accum_dtype


class AllHeadsNorm(RMSNorm):
    """``y = w * x / sqrt(mean(x^2) + eps)`` of a token's queries, or its keys, with the mean over
    all heads. Tensor-parallel ranks have some of the heads, and their part of the weight.

    Communicates: all-reduce of one number a token over the tensor-parallel group, in the forward
        and in the backward.
    """

    def __init__(self, config: Any, width: int, eps: float, group: Any):
        """``width``: elements of this rank's heads."""
        super().__init__(config, width, eps)
        self.group = group
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] of this rank, normalized."""
        heads = x.flatten(-2)
        if self.group.size() == 1:
            return super().forward(heads).view_as(x)
        out: Any = _SplitNorm.apply(heads, self.weight, self.eps, self.group)
        return out.view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return sharded_weight(self, self.group, prefix, sharded_offsets, metadata)


class _SplitNorm(torch.autograd.Function):
    """`rms_norm` of rows of which every rank of a group has equally many elements. It keeps what
    `rms_norm` keeps, and rounds as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Any) -> Tensor:
        wide = x.to(accum_dtype(x.dtype))
        scale = torch.rsqrt(_mean(wide.square(), group) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.group = group
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        of_normed = grad.to(scale.dtype) * weight
        mean = _mean(of_normed * normed, ctx.group)
        of_x = (of_normed - normed * mean) * scale
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, None


def _mean(part: Tensor, group: Any) -> Tensor:
    """[..., W] of this rank -> [..., 1], the mean over the elements of all ranks of ``group``."""
    mean = part.mean(-1, keepdim=True)
    dist.all_reduce(mean, group=group)
    return mean / group.size()


class NormedAttention(TurnedAttention):
    """Attention whose queries are normalized over all heads, and so are its keys.

    The norms are no ``q_layernorm`` and ``k_layernorm``: megatron's are for each head, and it sums
    gradients of weights with these names over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, *args: Any, **more: Any):
        super().__init__(config, *args, **more)
        width = self.hidden_size_per_attention_head
        shared = config.layernorm_epsilon, self.pg_collection.tp
        queries = self.num_attention_heads_per_partition * width
        keys = self.num_query_groups_per_partition * width
        self.query_norm = AllHeadsNorm(config, queries, *shared)
        self.key_norm = AllHeadsNorm(config, keys, *shared)

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(query), self.key_norm(key)
