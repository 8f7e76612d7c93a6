"""Adapters next to megatron's frozen linears: ``y = W x + scale B (A x)``.

Shards of the factors of W [out, in] on tensor-parallel ranks, and exchanges (r is the rank):

| W                           | A [r, in]      | B [out, r]     | between A and B             |
| cut by rows                 | whole          | cut as W       | all-gather of [tokens, r]   |
| cut by columns              | cut as W       | whole          | reduce-scatter of the same  |
| whole on each               | whole          | whole          | nothing                     |
| of experts, cut by rows     | whole          | cut as W       | nothing: the dispatcher     |
| of experts, cut by columns  | cut as W       | whole          | gathers and adds up tokens  |

The gradient of a whole factor is summed over the ranks: each has other tokens, or another part of
the other factor. megatron does that for parameters marked ``sequence_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from pyrl_ext.megatron.grouped_experts import GroupedExperts, grouped_linear


class LoraAdapter(nn.Module):
    """``scale B (A x)`` of one weight, or of the stacked weights of experts.

    A weight may be several HF linears on top of each other. Their A are stacked, and each row of
    the weight takes what the A of its linear makes.

    Args:
        weight:    [M, K], or [E, M, K] of experts: the part of this rank.
        a:         shape of ``lora_A``: [n * r, K] of n linears, or [E, n * r, K].
        b:         shape of ``lora_B``: [rows of the n linears, r], or with E before.
        linear_of: [M] which of the n linears each row belongs to; -1: to one without an adapter.
        scale:     what the product is multiplied by.

    Attributes:
        on: True if the adapter is applied.
    """

    mask: Tensor | None
    places: Tensor | None

    def __init__(
        self, weight: Tensor, a: Sequence[int], b: Sequence[int], linear_of: Tensor, scale: float
    ):
        super().__init__()
        self.scale = scale
        self.on = True
        self.lora_A = nn.Parameter(weight.new_empty(*a))
        self.lora_B = nn.Parameter(weight.new_empty(*b))
        self._rows = weight.shape[-2]
        linears = a[-2] // b[-1]
        rows = (linear_of >= 0).nonzero()[:, 0].to(weight.device)
        of_linear = F.one_hot(linear_of.to(weight.device)[rows], linears)[:, :, None]
        mask = of_linear.to(weight.dtype) if linears > 1 else None
        places = rows if len(rows) < self._rows else None
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("places", places, persistent=False)

    def add_to(
        self,
        out: Tensor,
        x: Tensor,
        between: Callable[[Tensor], Tensor] | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """``out`` [N, M] with the adapter's part for ``x`` [N, K], unless it is off.

        Args:
            between: of A x; None: nothing is exchanged.
            ends: of experts, as for `grouped_linear`.
        """
        if not self.on:
            return out
        narrow = _product(x, self.lora_A.to(x.dtype), ends)
        if between is not None:
            narrow = between(narrow)
        return out + _product(narrow * self.scale, self._spread(self.lora_B).to(x.dtype), ends)

    def _spread(self, b: Tensor) -> Tensor:
        """[..., M, n * r]: each row's numbers in the columns of its linear's A, and zeros."""
        if self.mask is not None:
            b = (b[..., None, :] * self.mask).flatten(-2)
        if self.places is None:
            return b
        zeros = b.new_zeros(*b.shape[:-2], self._rows, b.shape[-1])
        return zeros.index_copy(-2, self.places, b)

    @torch.no_grad()
    def delta(self, expert: int | None) -> Tensor:
        """[M, K] ``scale B A`` in float32; of the expert at that place among this rank's."""
        a, b = (
            f if expert is None or f.ndim == 2 else f[expert] for f in (self.lora_A, self.lora_B)
        )
        return self._spread(b).float() @ a.float() * self.scale


def _product(x: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
    if weight.ndim == 2:  # also of a factor that all experts share
        return F.linear(x, weight)
    assert ends is not None
    return grouped_linear(x, weight, ends)


# where adapters go -------------------------------------------------------------------------------


def adapt(owner: Any, attribute: str, adapter: LoraAdapter, shard: str, group: Any) -> None:
    """Let ``owner`` add what ``adapter`` makes to the product of its weight ``attribute``.

    Args:
        owner: `GroupedExperts`, a router, or a linear.
        shard: how ranks split the weight of a linear, see `Weight`.
        group: the tensor-parallel ranks that split it.
    """
    if isinstance(owner, GroupedExperts):
        owner.adapters[attribute] = adapter
        return
    owner.adapter = adapter
    if hasattr(owner, "gating"):
        owner.gating = partial(_gate, owner.gating, adapter)
        return
    between = None
    if group.size() > 1 and shard == "columns":
        between = partial(reduce_scatter_to_sequence_parallel_region, group=group)
    elif group.size() > 1 and shard != "same":
        between = partial(
            gather_from_sequence_parallel_region, tensor_parallel_output_grad=True, group=group
        )
    owner.register_forward_hook(partial(_after_linear, adapter, between))


def _gate(gating: Callable[[Tensor], Tensor], adapter: LoraAdapter, rows: Tensor) -> Tensor:
    """A router's logits, in the type that it computes them in."""
    logits = gating(rows)
    return adapter.add_to(logits, rows.to(logits.dtype))


def _after_linear(
    adapter: LoraAdapter, between: Any, _linear: nn.Module, args: tuple, output: tuple
) -> tuple:
    return adapter.add_to(output[0], args[0], between), output[1]


# factors among other parameters ------------------------------------------------------------------


class LiveFactor(NamedTuple):
    """A factor, and how ranks hold it.

    Args:
        key:     its name in the whole model.
        value:   this rank's part.
        cut:     dimension that tensor-parallel ranks split; None: each has it whole.
        sections: numbers of rows, each split separately, such as gates and ups.
        experts: True if its first dimension is experts.
    """

    key: str
    value: nn.Parameter
    cut: int | None
    sections: tuple[int, ...]
    experts: bool

    def mark(self, like: Tensor, size: int) -> None:
        """Tell megatron which ranks share the factor's gradient.

        Args:
            like: the weight that it belongs to.
            size: number of ranks that split that weight; of a factor that experts share, of all
                tensor-parallel ranks.
        """
        value: Any = self.value
        shared = like.ndim == 3 and not self.experts  # by experts of all ranks
        value.allreduce = shared or getattr(like, "allreduce", True)
        value.sequence_parallel = self.cut is None and size > 1
        if self.cut is not None:  # megatron counts others on one rank for the gradient's norm
            set_tensor_model_parallel_attributes(value, True, self.cut, 1)

    def sharded(self, groups: Any, prefix: str) -> Any:
        """The factor for ``dist_checkpointing``. megatron's linears would save it as if each rank
        had it whole."""
        tp = groups.expt_tp if self.experts else groups.tp
        dp = groups.expt_dp if self.experts else groups.dp_cp
        experts = [(0, groups.ep.rank(), groups.ep.size())] if self.experts else []
        key = prefix + self.key
        rank = tp.rank()
        if self.cut is None:
            replica = (0, rank, dp.rank())
            return ShardedTensor.from_rank_offsets(key, self.value, *experts, replica_id=replica)
        replica = (0, 0, dp.rank())
        if len(self.sections) == 1:
            offsets = [*experts, (self.cut, rank, tp.size())]
            return ShardedTensor.from_rank_offsets(key, self.value, *offsets, replica_id=replica)
        dim = self.cut
        rows = gcd(*self.sections)  # pieces of a checkpoint are equally long
        places = self._piece_places(rows, rank, tp.size())
        count = len(places) * tp.size()

        def split(key: str, data: Tensor, *_: Any) -> Any:
            return [
                ShardedTensor.from_rank_offsets(
                    key, piece, *experts, (dim, place, count), replica_id=replica
                )
                for piece, place in zip(data.split(rows, dim), places, strict=True)
            ]

        join: Any = partial(torch.cat, dim=dim)
        return ShardedTensorFactory(key, self.value, split, join, replica)

    def _piece_places(self, rows: int, rank: int, size: int) -> list[int]:
        """The place of each of this rank's pieces of ``rows`` rows among those of ``size`` ranks,
        which split each section separately."""
        places: list[int] = []
        for section in self.sections:
            count = section // rows
            first = len(places) * size + rank * count
            places += range(first, first + count)
        return places
