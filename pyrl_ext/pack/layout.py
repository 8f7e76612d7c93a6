"""The place of every token of a packed batch: the index vectors that all consumers share.

Three orders of the same tokens:

* *ragged*: sequence after sequence, no padding, T = sum(seqlens) rows. Batches are stored so.
* *packed*: the same with every sequence padded at its end, sum(padded_seqlens) rows.
* *local*: what one context-parallel rank holds, 1 / cp_size of packed. Zigzag: a padded sequence
  is cut into 2 * cp_size chunks and rank r holds chunks r and 2 * cp_size - 1 - r, so causal
  attention costs every rank the same. All-gathering over the group gives the *gathered* order,
  rank after rank.

Moving between them is :func:`~pyrl_ext.ops.gather_rows` with one of the vectors below. No other
file knows the zigzag.

Every vector is a few runs of consecutive numbers a sequence: the tables of runs are made here, and
:func:`~pyrl_ext.ops.expand_runs` writes them out.
"""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.ops import expand_runs
from pyrl_ext.schedule.alignment import alignment


class Segment(NamedTuple):
    """Causal attention of ``q_len`` local rows over ``k_len`` packed rows of one sequence.

    The last query sees the last key: query i sees keys up to ``k_len - q_len + i``.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int


def _expand(starts: np.ndarray, lengths: np.ndarray, size: int) -> Tensor:
    first, count = (torch.from_numpy(table.reshape(-1)) for table in (starts, lengths))
    return expand_runs(first, count, size)


def _interleave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack([first, second], axis=-1).reshape(-1)


@dataclass(frozen=True)
class TokenLayout:
    """The layout of ``seqlens`` over ``cp_size`` and, with sequence parallelism, ``tp_size`` ranks.

    Every sequence is padded to a multiple of `alignment` and of ``align``. A sequence may have no
    rows. Results are host tensors; nothing here waits for a device.

    Args:
        seqlens: [S] rows of each sequence.
        cp_size: context-parallel ranks.
        tp_size: ranks that share the local rows under sequence parallelism.
        align:   every padded length is also a multiple of this (FP8 asks for whole tiles).
        starts:  [S] row of the source stream where each sequence begins, -1: all of its rows are
            padding; None: ragged order.

    Raises:
        ValueError: a length or start is negative, a size below 1, or ``starts`` does not match.
    """

    seqlens: tuple[int, ...]
    cp_size: int = 1
    tp_size: int = 1
    align: int = 1
    starts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seqlens", tuple(int(n) for n in self.seqlens))
        for name, least in (("seqlens", 0), ("starts", -1)):
            for index, entry in enumerate(getattr(self, name) or ()):
                if entry < least:
                    raise ValueError(
                        f"TokenLayout: {name}[{index}] is {entry}, expected >= {least}"
                    )
        for name in ("cp_size", "tp_size", "align"):
            if getattr(self, name) < 1:
                raise ValueError(f"TokenLayout: {name} is {getattr(self, name)}, expected >= 1")
        if self.starts is not None and len(self.starts) != len(self.seqlens):
            raise ValueError(
                f"TokenLayout: starts has {len(self.starts)} entries, expected one for each of "
                f"the {len(self.seqlens)} sequences"
            )

    # lengths ------------------------------------------------------------------------------------

    @cached_property
    def padded_seqlens(self) -> tuple[int, ...]:
        """[S] rows of each sequence with its padding."""
        return tuple(self._padded.tolist())

    @cached_property
    def num_local(self) -> int:
        """Rows a CP rank holds, padding included, before the TP slice."""
        return int(self._padded.sum()) // self.cp_size

    @cached_property
    def max_padded_seqlen(self) -> int:
        """Rows of the longest padded sequence, 0 without sequences."""
        return max(self.padded_seqlens, default=0)

    # index vectors ------------------------------------------------------------------------------

    def rows(self, cp_rank: int) -> Tensor:
        """[num_local] int64 row of the source stream held in each local row, -1 in padding."""
        return self._counted(cp_rank, self._sources)

    def positions(self, cp_rank: int) -> Tensor:
        """[num_local] int64 position of each local row in its sequence, -1 in padding."""
        return self._counted(cp_rank, np.minimum(self._sources, 0))

    def following(self, cp_rank: int) -> Tensor:
        """[num_local] int64 row of the source stream that follows each local row in its sequence;
        -1 in padding and where a sequence ends."""
        rows = self.rows(cp_rank)
        lengths = torch.from_numpy(np.repeat(self._lengths, self._padded // self.cp_size))
        none = (rows < 0) | (self.positions(cp_rank) == lengths - 1)
        return torch.where(none, -1, rows + 1)

    def shard(self, local: Tensor, tp_rank: int) -> Tensor:
        """[num_local / tp_size, ...] the part of local rows that sequence parallelism keeps."""
        self._check_rank("tp", tp_rank)
        part = len(local) // self.tp_size
        return local[tp_rank * part : (tp_rank + 1) * part]

    def global_order(self) -> Tensor:
        """[cp_size * num_local] int64 row of the gathered order that holds each packed row."""
        first = (np.cumsum(self._padded) - self._padded)[:, None] // self.cp_size
        total = int(self._padded.sum())
        if self.cp_size == 1:
            return _expand(first, self._padded, total)
        chunk = self._padded[:, None] // (2 * self.cp_size)
        k = np.arange(2 * self.cp_size)
        rank = np.minimum(k, 2 * self.cp_size - 1 - k)
        starts = rank * self.num_local + first + np.where(k < self.cp_size, 0, chunk)
        return _expand(starts, np.broadcast_to(chunk, starts.shape).copy(), total)

    @cached_property
    def gathered_rows(self) -> Tensor:
        """[T] int64 row of the gathered order that holds each row of the ragged order."""
        first = np.cumsum(self._padded) - self._padded
        packed = _expand(first, self._lengths, int(self._lengths.sum()))
        return self.global_order()[packed]

    def segments(self, cp_rank: int) -> tuple[Segment, ...]:
        """The causal attention of a rank, one piece for each contiguous run of its rows.

        Keys are counted in packed order (see :meth:`global_order`); padding rows are included.
        """
        at, size = self._chunks(cp_rank)
        starts = np.cumsum(self._padded) - self._padded
        starts = np.repeat(starts, 1 if self.cp_size == 1 else 2)
        pieces = zip(np.cumsum(size) - size, size, starts, at + size, strict=True)
        return tuple(Segment(*map(int, piece)) for piece in pieces if piece[1])

    # the zigzag ---------------------------------------------------------------------------------

    def _counted(self, cp_rank: int, first: np.ndarray) -> Tensor:
        """[num_local] int64: ``first`` [S] plus the position of each local row in its sequence; -1
        in padding, and where ``first`` is negative."""
        at, size = self._chunks(cp_rank)
        chunks = 1 if self.cp_size == 1 else 2
        first = np.repeat(first, chunks)
        real = np.where(first < 0, 0, np.clip(np.repeat(self._lengths, chunks) - at, 0, size))
        starts = _interleave(first + at, np.full_like(at, -1))
        return _expand(starts, _interleave(real, size - real), self.num_local)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.asarray(self.seqlens, dtype=np.int64)

    @cached_property
    def _padded(self) -> np.ndarray:
        unit = lcm(alignment(self.tp_size, self.cp_size), self.align)
        return -(-self._lengths // unit) * unit

    @cached_property
    def _sources(self) -> np.ndarray:
        if self.starts is not None:
            return np.asarray(self.starts, dtype=np.int64)
        return np.cumsum(self._lengths) - self._lengths

    def _check_rank(self, kind: str, rank: int) -> None:
        size = getattr(self, f"{kind}_size")
        if not 0 <= rank < size:
            raise ValueError(f"TokenLayout: {kind}_rank is {rank}, expected one in [0, {size})")

    def _chunks(self, cp_rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(first position in its sequence, rows) of each chunk of this rank, in local order."""
        self._check_rank("cp", cp_rank)
        if self.cp_size == 1:
            return np.zeros_like(self._padded), self._padded
        chunk = self._padded // (2 * self.cp_size)
        mirrored = 2 * self.cp_size - 1 - cp_rank
        return _interleave(cp_rank * chunk, mirrored * chunk), _interleave(chunk, chunk)
