"""Need: the rows of ragged streams that a rank needs, and who holds them."""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.pack.rank_rows import Lengths

Columns = Mapping[str, Tensor]
_ROWS_AT_ONCE = 1 << 14  # the rows on their way from column to column stay small


class Field(NamedTuple):
    """One column of rows.

    Args:
        kind:  one of KINDS.
        dtype: of its numbers.
        shape: of a row.
        slots: what is needed of the first axis of the owner's rows; None: all.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    slots: tuple[int, ...] | None = None

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Items:
    """Runs of rows in one ragged stream, each held by one rank, its owner.

    Args:
        lengths: of the items.
        owners:  [S] int32, rank that holds each item.
    """

    lengths: Lengths
    owners: np.ndarray

    @cached_property
    def _starts_at_owner(self) -> np.ndarray:
        """[S] first row of each item among those of its owner."""
        order = np.argsort(self.owners, kind="stable")
        lengths = self.lengths.seqlens[order].astype(np.int64)
        owners = self.owners[order]
        starts = np.cumsum(lengths) - lengths
        starts_at_owner = np.empty_like(starts)
        starts_at_owner[order] = starts - starts[np.searchsorted(owners, owners)]
        return starts_at_owner

    def rows_held_by(self, owner: int) -> int:
        """Number of rows that ``owner`` holds."""
        return int(self.lengths.seqlens[self.owners == owner].sum())

    def at_owner(self, rows: np.ndarray) -> Tensor:
        """[M] int64, place of each row among those of its owner."""
        items = self.lengths.sample_of(rows)
        return torch.from_numpy(rows - self.lengths.starts[items] + self._starts_at_owner[items])


class NeededRows(NamedTuple):
    """The rows of one ragged stream that a rank needs.

    Args:
        items:  of the stream.
        rows:   [N] int64, in the order in which the rank computes them.
        cuts:   [P + 1] where each part begins in them, then N.
        fields: column -> what it needs of it.
        kept:   [first, end) of the vocabulary, the part that it needs of the rows' kept sets; None:
            it needs no sets.
    """

    items: Items
    rows: np.ndarray
    cuts: np.ndarray
    fields: Mapping[str, Field]
    kept: tuple[int, int] | None = None

    def by_part_and_owner(self) -> dict[tuple[int, int], np.ndarray]:
        """(part, owner) -> places of its rows in ``rows``, ascending."""
        if not len(self.rows):
            return {}
        parts = np.searchsorted(self.cuts, np.arange(len(self.rows)), side="right") - 1
        owners = self.items.owners[self.items.lengths.sample_of(self.rows)]
        order = np.lexsort((owners, parts))
        parts = parts[order]
        owners = owners[order]
        cuts = np.flatnonzero(np.diff(parts) | np.diff(owners)) + 1
        firsts = [0, *cuts.tolist()]
        keys = zip(parts[firsts].tolist(), owners[firsts].tolist(), strict=True)
        return dict(zip(keys, np.split(order, cuts), strict=True))

    def copy(self, columns: Columns, rows: np.ndarray, there: Columns, places: Tensor) -> None:
        """Copy what is needed of ``rows``, whose owner holds ``columns``, to places in ``there``.

        Args:
            rows:   [M] int64, of the stream.
            places: [M] int64.
        """
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            places_at_owner = self.items.at_owner(rows[part])
            for name, column in self.fields.items():
                values = bits(columns[name]).index_select(0, places_at_owner)
                if column.slots is not None:
                    values = values.index_select(1, torch.tensor(column.slots, dtype=torch.int64))
                bits(there[name]).index_copy_(0, places[part], values)

    def sets(self, columns: Columns, rows: np.ndarray) -> KeptSets | None:
        """The part that it needs of the kept sets of ``rows``, whose owner holds ``columns``."""
        if self.kept is None:
            return None
        ids = columns.get("kept_ids", torch.empty(0, dtype=torch.int32))  # a block holds no 0 rows
        held = KeptSets(columns["kept_counts"], ids)
        return held.select(self.items.at_owner(rows)).within(*self.kept)

    def add_bytes(self, num_rows: int, received: dict[str, int]) -> None:
        """Add the bytes of ``num_rows`` rows to ``received``, by kind."""
        for column in self.fields.values():
            received[column.kind] += num_rows * column.row_bytes


Needs = Mapping[str, NeededRows]  # by the name of the stream
# columns of kept sets, in addition to `NeededRows.fields`
KEPT_COUNTS = {"kept_counts": Field("kept", torch.int32)}
KEPT_IDS = {"kept_ids": Field("kept", torch.int32)}


def bits(column: Tensor) -> Tensor:
    """``column``; torch selects and copies no rows of uint16, so its bits as int16."""
    return column.view(torch.int16) if column.dtype == torch.uint16 else column
