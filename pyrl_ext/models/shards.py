"""Checkpoint tensors <-> the shards of tensor-parallel ranks, for each way of splitting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyrl_ext.plan.model.weight import Weight

Pieces = tuple[list[Tensor], int]  # of a checkpoint tensor, and the dimension to concatenate along


class Sliceable(Protocol):
    """A tensor in memory, or one in a file, from which only the requested slice is read."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, at: Any, /) -> Tensor: ...


def shard_of(weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
    """The shard of checkpoint ``tensors`` on rank ``rank`` of ``size``.

    Reads only that shard, except that a query group which several ranks share, and queries, keys
    and values or sections in one tensor, are read whole.
    """
    match weight.shard:
        case "same":
            return _stacked([tensor[:] for tensor in tensors])
        case "rows" | "gated":
            return _stacked([tensor[_rank_rows(tensor.shape[0], size, rank)] for tensor in tensors])
        case "columns":
            return tensors[0][:, _rank_rows(tensors[0].shape[1], size, rank)]
        case "vocab":
            return _shard_vocab(tensors[0], size, rank)
        case "grouped":
            return _shard_groups(weight, tensors, size, rank)
        case "sections":
            return _shard_sections(weight, tensors, size, rank)


def pieces_of(weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
    """The checkpoint tensors that ``shards`` (by rank) were cut from: the inverse of `shard_of`.

    Returns: the pieces of each tensor and the dimension to concatenate them along. The pieces are
        views of the shards, except those of "grouped" and "sections".
    """
    match weight.shard:
        case "same":
            return [([part], 0) for part in shards[0].split([shape[0] for shape in weight.shapes])]
        case "rows":
            return [(list(shards), 0)]
        case "columns":
            return [(list(shards), 1)]
        case "gated":
            halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
            return [(list(half), 0) for half in halves]
        case "vocab":  # without the padding
            rows = weight.shapes[0][0]
            size = len(shards[0])
            return [([shard[: max(0, rows - i * size)] for i, shard in enumerate(shards)], 0)]
        case "grouped":
            return _merge_groups(weight, shards)
        case "sections":
            return _merge_sections(weight, shards)


def whole_of(weight: Weight, shards: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `pieces_of`, concatenated; a tensor of one piece is not copied."""
    return [_stacked(pieces, dim) for pieces, dim in pieces_of(weight, shards)]


def _rank_rows(length: int, size: int, rank: int) -> slice:
    count = -(-length // size)
    return slice(rank * count, (rank + 1) * count)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([*tensors], dim) if len(tensors) > 1 else tensors[0]


def _shard_vocab(table: Sliceable, size: int, rank: int) -> Tensor:
    """Rows; the last shards end with padding."""
    wanted = _rank_rows(table.shape[0], size, rank)
    rows = table[wanted]
    missing = wanted.stop - wanted.start - len(rows)
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, table.shape[1])])


# queries, keys and values of each query group in sequence ----------------------------------------


def _shard_groups(weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
    parts = tensors[0][:].chunk(3) if weight.is_fused else tensors
    groups = weight.heads[1]
    group_rows = sum(part.shape[0] for part in parts) // groups
    wanted = _rank_rows(groups * group_rows, size, rank)
    first = wanted.start // group_rows
    last = -(-wanted.stop // group_rows)
    by_group: list[Tensor] = []
    for part in parts:
        rows = part.shape[0]
        of_groups = part[slice(first * rows // groups, last * rows // groups)]
        by_group.append(of_groups.unflatten(0, (last - first, -1)))
    if weight.gates:
        by_group[0] = _swapped(by_group[0], weight.heads[0] // groups, 2)
    rows_of_groups = torch.cat(by_group, 1).flatten(0, 1)
    start = first * group_rows
    return rows_of_groups[wanted.start - start : wanted.stop - start]


def _merge_groups(weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
    groups = weight.heads[1]
    rows = [shape[0] for shape in weight.shapes]
    if weight.is_fused:
        rows = [rows[0] // 3] * 3
    grouped = _stacked(shards).unflatten(0, (groups, -1))
    by_group = [*grouped.split([n // groups for n in rows], 1)]
    if weight.gates:
        by_group[0] = _swapped(by_group[0], 2, weight.heads[0] // groups)
    tensors = [part.flatten(0, 1) for part in by_group]
    return [(tensors, 0)] if weight.is_fused else [([tensor], 0) for tensor in tensors]


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """[G, outer * inner * n, ...] -> [G, inner * outer * n, ...]: queries and gates of one head
    after the other as those of all heads, or back."""
    return rows.unflatten(1, (outer, inner, -1)).transpose(1, 2).flatten(1, 3)


# rows of each section separately; in the checkpoint the sections of each group in sequence -------


def _shard_sections(weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
    shards: list[Tensor] = []
    for tensor, rows in zip(tensors, weight.sections, strict=True):
        for section in tensor[:].unflatten(0, (weight.groups, -1)).split([*rows], 1):
            section = section.flatten(0, 1)
            shards.append(section[_rank_rows(len(section), size, rank)])
    return torch.cat(shards)


def _merge_sections(weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
    by_rank = [shard.split(weight.sections_of(len(shard))) for shard in shards]
    sections = (
        torch.cat(section).unflatten(0, (weight.groups, -1))
        for section in zip(*by_rank, strict=True)
    )
    pieces: list[Pieces] = []
    for rows in weight.sections:
        tensor = torch.cat([next(sections) for _ in rows], 1).flatten(0, 1)
        pieces.append(([tensor], 0))
    return pieces
