"""The tokens that top-p and top-k left: log-probs are taken over them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import to_device


@dataclass(frozen=True, eq=False)
class KeptSets:
    """Sets of tokens, one of each of N rows, on the host.

    Args:
        counts: [N] int32, tokens in the row's set; -1: all of the vocabulary.
        ids:    [sum of counts >= 0] int32, the sets row by row.
    """

    counts: Tensor
    ids: Tensor

    @classmethod
    def joined(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """The rows of all parts, one part after the other."""
        counts, ids = ([getattr(p, name) for p in parts] for name in ("counts", "ids"))
        empty = torch.empty(0, dtype=torch.int32)
        return cls(torch.cat([empty, *counts]), torch.cat([empty, *ids]))

    @cached_property
    def starts(self) -> Tensor:
        """[N + 1] int64, where each row's set begins in ``ids``, then their number."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.counts.clamp(min=0).cumsum(0)])

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.ids.nbytes

    def select(self, rows: Tensor) -> KeptSets:
        """The sets of ``rows`` [M] int64; all of the vocabulary for -1."""
        counts = torch.cat([self.counts, self.counts.new_full((1,), -1)])[rows]  # [-1] is the last
        sizes = counts.clamp(min=0)
        ends = sizes.cumsum(0)
        shift = (self.starts[rows] - ends + sizes).repeat_interleave(sizes)
        return KeptSets(counts, self.ids[torch.arange(len(shift)) + shift])

    def within(self, first: int, end: int) -> KeptSets:
        """The same sets without tokens outside ``[first, end)``."""
        inside = (self.ids >= first) & (self.ids < end)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), inside.cumsum(0)])[self.starts]
        counts = torch.where(self.counts < 0, -1, before.diff()).int()
        return KeptSets(counts, self.ids[inside])

    def masks(self, first: int, columns: int, device: torch.device) -> KeepMasks:
        """The masks of a shard of the vocabulary, columns ``[first, first + columns)``."""
        return KeepMasks(self.within(first, first + columns), columns, device)

    def mask(self, shard: int, logits: Tensor) -> Tensor:
        """[N, V_local] bool, the whole mask of ``logits`` [N, V_local] of a shard."""
        rows, columns = logits.shape
        masks = self.masks(shard * columns, columns, logits.device)
        return masks.tile(slice(0, rows), shard * columns, columns)


class KeepMasks:
    """Masks of N tokens over a shard of the vocabulary, made tile by tile.

    Args:
        sets:    of tokens of the shard alone.
        columns: of the shard.
    """

    def __init__(self, sets: KeptSets, columns: int, device: torch.device):
        tokens = torch.arange(len(sets.counts)).repeat_interleave(sets.counts.clamp(min=0))
        self._columns = columns
        self._starts = sets.starts
        self._tokens = to_device(tokens, device)
        self._ids = to_device(sets.ids.long(), device)
        self._free = to_device(sets.counts < 0, device)

    def tile(self, part: slice, first: int, columns: int) -> Tensor:
        """[n, columns] bool, what is kept of tokens ``part`` in columns from ``first`` on.

        Args:
            first: global column.
        """
        found = slice(int(self._starts[part.start]), int(self._starts[part.stop]))
        tokens = self._tokens[found] - part.start
        ids = self._ids[found] - first
        if columns < self._columns:
            inside = (ids >= 0) & (ids < columns)
            tokens = tokens[inside]
            ids = ids[inside]
        mask = self._free[part, None].repeat(1, columns)
        mask.view(-1).index_fill_(0, tokens * columns + ids, True)
        return mask
