"""One megatron parameter, the checkpoint tensors it is made of, and the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Shard = Literal["same", "rows", "columns", "gated", "grouped", "sections", "vocab"]
SECTIONED = "gated", "sections"
Size = tuple[int, ...]
Start = Literal["zeros", "ones", "decays", "steps"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One megatron parameter and the checkpoint tensors it is made of.

    Args:
        hf_names: checkpoint names, in the order they are stacked.
        megatron_name: its name, with global ids of layer and expert.
        shard:   how tensor-parallel ranks split it. "same": not at all; "rows"; "columns"; "gated":
                 by rows within each stacked tensor (gate and up); "grouped": by rows, with query,
                 key and value, or two of them, interleaved by query group; "sections": by rows
                 within each of ``sections``; "vocab": by rows of the vocabulary, padded to a
                 multiple of the ranks.
        shapes:  of the checkpoint tensors, in the order of ``hf_names``.
        expert:  id of its expert, whose expert-tensor-parallel ranks split it; None: not an
                 expert's.
        heads:   (query heads, key/value heads) if ``shard`` is "grouped".
        float32: whether it is float32 whatever the model's dtype.
        gates:   whether as many rows of gates follow those of each query head in its checkpoint
                 tensor, if ``shard`` is "grouped"; in the parameter those of each query group.
        sections: of each checkpoint tensor, the rows that one of ``groups`` has in each section, if
                 ``shard`` is "sections": a tensor has group after group, with all sections of each;
                 the parameter has section after section, with all groups of each.
        groups:  of the sections.
        start:   its values without a checkpoint; None: as its name says (`RandomWeights`).
    """

    hf_names: tuple[str, ...]
    megatron_name: str
    shard: Shard
    shapes: tuple[Size, ...]
    expert: int | None = None
    heads: tuple[int, int] = (1, 1)
    float32: bool = False
    gates: bool = False
    sections: tuple[tuple[int, ...], ...] = ()
    groups: int = 1
    start: Start | None = None

    @classmethod
    def same(cls, hf: str, name: str, *size: int, float32: bool = False) -> Weight:
        return cls((hf,), name, "same", (size,), float32=float32)

    @classmethod
    def rows(cls, hf: str, name: str, *size: int) -> Weight:
        return cls((hf,), name, "rows", (size,))

    @classmethod
    def columns(cls, hf: str, name: str, *size: int, expert: int | None = None) -> Weight:
        return cls((hf,), name, "columns", (size,), expert)

    @classmethod
    def inner(cls, hf: Sequence[str], name: str, *size: int, expert: int | None = None) -> Weight:
        """``hf``: gate and up, or up alone."""
        return cls((*hf,), name, "gated" if len(hf) == 2 else "rows", (size,) * len(hf), expert)

    @classmethod
    def grouped(
        cls,
        q: str,
        k: str,
        v: str,
        name: str,
        heads: tuple[int, int],
        *head: int,
        gates: bool = False,
    ) -> Weight:
        """``head``: the shape of one query, key or value head."""
        width, *rest = head
        rows = (heads[0] * (1 + gates), heads[1], heads[1])
        shapes = tuple((n * width, *rest) for n in rows)
        return cls((q, k, v), name, "grouped", shapes, heads=heads, gates=gates)

    @classmethod
    def fused(cls, hf: str, name: str, heads: int, *head: int) -> Weight:
        """Queries, keys and values of ``heads`` heads each, which the checkpoint stacks in one
        tensor."""
        width, *rest = head
        return cls((hf,), name, "grouped", ((3 * heads * width, *rest),), heads=(heads, heads))

    @classmethod
    def sectioned(
        cls,
        name: str,
        sections: Mapping[str, tuple[int, ...]],
        groups: int,
        *rest: int,
    ) -> Weight:
        """``sections``: checkpoint name -> rows of one group in each of its sections."""
        shapes = tuple((groups * sum(rows), *rest) for rows in sections.values())
        each = tuple(sections.values())
        return cls(tuple(sections), name, "sections", shapes, sections=each, groups=groups)

    @classmethod
    def vocab(cls, hf: str, name: str, *size: int) -> Weight:
        return cls((hf,), name, "vocab", (size,))

    @property
    def is_fused(self) -> bool:
        """True if one checkpoint tensor holds queries, keys and values."""
        return self.shard == "grouped" and len(self.hf_names) == 1

    def sections_of(self, rows: int) -> tuple[int, ...]:
        """The rows of each section that ranks split by itself, in a part of so many rows."""
        each = [1, 1] if self.shard == "gated" else [n for some in self.sections for n in some]
        return tuple(n * rows // sum(each) for n in each) if self.shard in SECTIONED else (rows,)

    def part(self, size: int) -> Size:
        """Shape of the part on each of ``size`` tensor-parallel ranks."""
        rows, *rest = sum(shape[0] for shape in self.shapes), *self.shapes[0][1:]
        if self.shard == "same":
            return rows, *rest
        if self.shard == "columns":
            return rows, rest[0] // size
        return -(-rows // size), *rest


# checkpoint tensors <-> this rank's part ---------------------------------------------------------


class Sliceable(Protocol):
    """A tensor in memory, or one in a file, from which only the requested slice is read."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, at: Any, /) -> Tensor: ...


def shard_of(weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
    """The part of checkpoint ``tensors`` on rank ``rank`` of ``size``.

    Reads only that part, except that a query group which several ranks share, and queries, keys and
    values or sections in one tensor, are read whole.
    """
    if weight.shard == "columns":
        return tensors[0][:, _part(tensors[0].shape[1], size, rank)]
    if weight.shard == "vocab":
        (full,) = tensors
        part = _part(full.shape[0], size, rank)
        rows = full[part]
        padding = rows.new_zeros(part.stop - part.start - len(rows), full.shape[1])
        return torch.cat([rows, padding]) if len(padding) else rows
    if weight.shard == "grouped":
        parts = tensors[0][:].chunk(3) if weight.is_fused else tensors
        return _grouped_shard(weight, parts, size, rank)
    if weight.shard == "sections":
        by_tensor = zip(tensors, weight.sections, strict=True)
        found = [part for t, rows in by_tensor for part in _sections(t[:], rows, weight.groups)]
        return torch.cat([part[_part(len(part), size, rank)] for part in found])
    whole = weight.shard == "same"
    parts = [t[:] if whole else t[_part(t.shape[0], size, rank)] for t in tensors]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _part(length: int, size: int, rank: int) -> slice:
    each = -(-length // size)
    return slice(rank * each, (rank + 1) * each)


def _grouped_shard(weight: Weight, tensors: Sequence[Sliceable], size: int, rank: int) -> Tensor:
    groups = weight.heads[1]
    rows = sum(t.shape[0] for t in tensors) // groups  # of a group
    mine = _part(groups * rows, size, rank)
    first = mine.start // rows
    last = -(-mine.stop // rows)
    taken = [t[slice(*(g * t.shape[0] // groups for g in (first, last)))] for t in tensors]
    by_group = [t.unflatten(0, (last - first, -1)) for t in taken]
    if weight.gates:
        by_group[0] = _swapped(by_group[0], weight.heads[0] // groups, 2)
    rows_of_groups = torch.cat(by_group, 1).flatten(0, 1)
    return rows_of_groups[mine.start - first * rows : mine.stop - first * rows]


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """[G, outer * inner * n, ...] -> [G, inner * outer * n, ...]: queries and gates of one head
    after the other as those of all heads, or back."""
    return rows.unflatten(1, (outer, inner, -1)).transpose(1, 2).flatten(1, 3)


def _sections(tensor: Tensor, rows: Sequence[int], groups: int) -> list[Tensor]:
    """Each section of a checkpoint tensor, group after group."""
    parts = tensor.unflatten(0, (groups, -1)).split([*rows], 1)
    return [part.flatten(0, 1) for part in parts]


def _unsectioned(weight: Weight, shards: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `_sections`, from the parts of all ranks."""
    rows = [n * weight.groups // len(shards) for each in weight.sections for n in each]
    sections = zip(*(shard.split(rows) for shard in shards), strict=True)
    by_group = (torch.cat(each).unflatten(0, (weight.groups, -1)) for each in sections)
    return [torch.cat([*islice(by_group, len(n))], 1).flatten(0, 1) for n in weight.sections]


def pieces_of(weight: Weight, shards: Sequence[Tensor]) -> list[tuple[list[Tensor], int]]:
    """The checkpoint tensors that ``shards`` (by rank) were cut from: the inverse of `shard_of`.

    Returns: the pieces of each tensor and the dimension to concatenate them along. The pieces are
        views of the shards, except those of "grouped" and "sections".
    """
    if weight.shard == "same":
        return [([part], 0) for part in shards[0].split([shape[0] for shape in weight.shapes])]
    if weight.shard == "gated":
        gates, ups = zip(*(shard.chunk(2, 0) for shard in shards), strict=True)
        return [(list(gates), 0), (list(ups), 0)]
    if weight.shard == "grouped":
        whole = shards[0] if len(shards) == 1 else torch.cat(list(shards))
        groups = weight.heads[1]
        rows = [shape[0] for shape in weight.shapes]
        fused = weight.is_fused
        rows = [rows[0] // 3] * 3 if fused else rows
        by_group = [*whole.unflatten(0, (groups, -1)).split([n // groups for n in rows], 1)]
        if weight.gates:
            by_group[0] = _swapped(by_group[0], 2, weight.heads[0] // groups)
        parts = [part.flatten(0, 1) for part in by_group]
        return [(parts, 0)] if fused else [([part], 0) for part in parts]
    if weight.shard == "sections":
        return [([tensor], 0) for tensor in _unsectioned(weight, shards)]
    if weight.shard == "vocab":  # the last shards end with padding
        rows = weight.shapes[0][0]
        size = shards[0].shape[0]
        return [([shard[: max(0, rows - i * size)] for i, shard in enumerate(shards)], 0)]
    return [(list(shards), int(weight.shard == "columns"))]


def whole_of(weight: Weight, shards: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `pieces_of`, concatenated; a tensor of one piece is not copied."""
    pieces = pieces_of(weight, shards)
    return [each[0] if len(each) == 1 else torch.cat(each, dim) for each, dim in pieces]
