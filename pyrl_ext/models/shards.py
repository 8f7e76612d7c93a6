"""Checkpoint tensors <-> the shards of tensor-parallel ranks: a class for each way of splitting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyrl_ext.plan.model.weight import Shard, Weight

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
    return _KINDS[weight.shard].shard(weight, tensors, size, rank)


def pieces_of(weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
    """The checkpoint tensors that ``shards`` (by rank) were cut from: the inverse of `shard_of`.

    Returns: the pieces of each tensor and the dimension to concatenate them along. The pieces are
        views of the shards, except those of "grouped" and "sections".
    """
    return _KINDS[weight.shard].merge(weight, shards)


def whole_of(weight: Weight, shards: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `pieces_of`, concatenated; a tensor of one piece is not copied."""
    return [
        pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        for pieces, dim in pieces_of(weight, shards)
    ]


def _rank_rows(length: int, size: int, rank: int) -> slice:
    count = -(-length // size)
    return slice(rank * count, (rank + 1) * count)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


class _Kind(Protocol):
    def shard(
        self, weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int
    ) -> Tensor: ...

    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]: ...


class _Same:
    def shard(self, weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
        return _stacked([tensor[:] for tensor in tensors])

    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
        return [([tensor], 0) for tensor in shards[0].split([shape[0] for shape in weight.shapes])]


class _Rows:
    def shard(self, weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
        return _stacked([tensor[_rank_rows(tensor.shape[0], size, rank)] for tensor in tensors])

    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
        return [(list(shards), 0)]


class _Gated(_Rows):
    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
        halves = [shard.chunk(2, 0) for shard in shards]
        gates = [gate for gate, _ in halves]
        ups = [up for _, up in halves]
        return [(gates, 0), (ups, 0)]


class _Columns:
    def shard(self, weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
        return tensors[0][:, _rank_rows(tensors[0].shape[1], size, rank)]

    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
        return [(list(shards), 1)]


class _Vocab:
    """Rows; the last shards end with padding."""

    def shard(self, weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
        table = tensors[0]
        wanted = _rank_rows(table.shape[0], size, rank)
        rows = table[wanted]
        missing = wanted.stop - wanted.start - len(rows)
        if not missing:
            return rows
        return torch.cat([rows, rows.new_zeros(missing, table.shape[1])])

    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
        rows = weight.shapes[0][0]
        size = shards[0].shape[0]
        return [([shard[: max(0, rows - i * size)] for i, shard in enumerate(shards)], 0)]


class _Grouped:
    """Queries, keys and values of each query group in sequence."""

    def shard(self, weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
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

    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
        whole = _stacked(list(shards))
        groups = weight.heads[1]
        rows = [shape[0] for shape in weight.shapes]
        if weight.is_fused:
            rows = [rows[0] // 3] * 3
        by_group = [*whole.unflatten(0, (groups, -1)).split([n // groups for n in rows], 1)]
        if weight.gates:
            by_group[0] = _swapped(by_group[0], 2, weight.heads[0] // groups)
        tensors = [part.flatten(0, 1) for part in by_group]
        return [(tensors, 0)] if weight.is_fused else [([tensor], 0) for tensor in tensors]


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """[G, outer * inner * n, ...] -> [G, inner * outer * n, ...]: queries and gates of one head
    after the other as those of all heads, or back."""
    return rows.unflatten(1, (outer, inner, -1)).transpose(1, 2).flatten(1, 3)


class _Sections:
    """Rows of each section separately; in the checkpoint the sections of each group in sequence."""

    def shard(self, weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
        shards: list[Tensor] = []
        for tensor, rows in zip(tensors, weight.sections, strict=True):
            for section in tensor[:].unflatten(0, (weight.groups, -1)).split([*rows], 1):
                section = section.flatten(0, 1)
                shards.append(section[_rank_rows(len(section), size, rank)])
        return torch.cat(shards)

    def merge(self, weight: Weight, shards: Sequence[Tensor]) -> list[Pieces]:
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


_KINDS: dict[Shard, _Kind] = {
    "same": _Same(),
    "rows": _Rows(),
    "columns": _Columns(),
    "gated": _Gated(),
    "grouped": _Grouped(),
    "sections": _Sections(),
    "vocab": _Vocab(),
}
