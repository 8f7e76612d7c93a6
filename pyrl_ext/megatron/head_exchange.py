"""Rows of all heads against all rows of some heads, for layers that carry a state along packed
sequences: the ranks of a microbatch's context-parallel group have whole sequences there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.parallel.topology import Place


def of_rank(weights: Tensor, sections: Sequence[int], place: Place) -> Tensor:
    """The part of each section for the heads of a context-parallel rank."""
    parts = [part.chunk(place.cp_size)[place.cp_rank] for part in weights.split([*sections])]
    return torch.cat(parts)


def rows_to_heads(rows: Tensor, sections: Sequence[int], packed: PackedSequences) -> Tensor:
    """[T_local, W], all heads of this rank's rows -> [T, W / cp], a part of the heads of all rows,
    in packed order.

    Communicates: an all-to-all over the microbatch's context-parallel group.
    """
    place = packed.place
    if place.cp_group is None:
        return rows
    by_rank = zip(*(part.chunk(place.cp_size, -1) for part in rows.split([*sections], -1)))
    rows = torch.cat([torch.cat(each, -1) for each in by_rank])
    return packed.from_ranks.take(all_to_all(place.cp_group, rows))


def heads_to_rows(heads: Tensor, packed: PackedSequences) -> Tensor:
    """[T, W / cp] -> [T_local, W]: the inverse, and as much to communicate."""
    place = packed.place
    if place.cp_group is None:
        return heads
    rows = all_to_all(place.cp_group, packed.to_ranks.take(heads))
    return torch.cat(rows.chunk(place.cp_size), -1)
