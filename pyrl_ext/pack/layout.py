"""Where every token of a packed batch lives: the index vectors that all consumers share.

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
:func:`~pyrl_ext.ops.expand_runs` writes them out. With a ``capacity`` a vector is longer than its
batch needs, so that one CUDA graph, whose shapes are fixed, serves every batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.ops import expand_runs


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


def _kept(method: Callable) -> Callable:
    """Compute once per instance and arguments; the tensors returned are shared, so read-only."""

    @wraps(method)
    def wrapper(self: "TokenLayout", *args: Any, **kwargs: Any) -> Any:
        key = (method.__name__, args, tuple(kwargs.items()))
        if key not in self._cache:
            self._cache[key] = method(self, *args, **kwargs)
        return self._cache[key]

    return wrapper


@dataclass(frozen=True)
class TokenLayout:
    """The layout of ``seqlens`` over ``cp_size`` and, with sequence parallelism, ``tp_size`` ranks.

    Every sequence is padded to a multiple of ``tp_size``, or of ``2 * cp_size * tp_size`` where
    ``cp_size > 1``, and of ``align``. A sequence may have no rows. Results are computed once and
    shared: do not write to them. They are host tensors; nothing here waits for a device.

    Args:
        seqlens: [S] rows of each sequence.
        cp_size: context-parallel ranks.
        tp_size: ranks that share the local rows under sequence parallelism.
        align:   every padded length is also a multiple of this (FP8 needs ``16 * cp_size``).
        starts:  [S] row of the source stream where each sequence begins; None: ragged order.

    Raises:
        ValueError: a length or start is negative, a size below 1, or ``starts`` does not match.
    """

    seqlens: tuple[int, ...]
    cp_size: int = 1
    tp_size: int = 1
    align: int = 1
    starts: tuple[int, ...] | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seqlens", tuple(int(n) for n in self.seqlens))
        for name in ("seqlens", "starts"):
            for index, entry in enumerate(getattr(self, name) or ()):
                if entry < 0:
                    raise ValueError(f"TokenLayout: {name}[{index}] is {entry}, expected >= 0")
        for name in ("cp_size", "tp_size", "align"):
            if getattr(self, name) < 1:
                raise ValueError(f"TokenLayout: {name} is {getattr(self, name)}, expected >= 1")
        if self.starts is not None and len(self.starts) != len(self.seqlens):
            raise ValueError(
                f"TokenLayout: starts has {len(self.starts)} entries, expected one for each of "
                f"the {len(self.seqlens)} sequences"
            )

    @classmethod
    def from_mask(
        cls, mask: Tensor, cp_size: int = 1, tp_size: int = 1, align: int = 1
    ) -> "TokenLayout":
        """The layout of a padded batch, whose ``rows`` index the flattened [B * S] tokens.

        Args:
            mask: [B, S] bool on the host, True at real tokens, which are one run per row: padding
                left, right or both.

        Raises:
            ValueError: a row of the mask has a hole.
        """
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ValueError(
                f"TokenLayout.from_mask: mask is {mask.dtype} {list(mask.shape)}, expected bool "
                "[B, S]"
            )
        width, flags = mask.shape[1], mask.numpy()
        first = flags.argmax(axis=1) if width else np.zeros(len(flags), np.int64)
        lengths = np.array([np.count_nonzero(row) for row in flags], np.int64)
        for index, (row, at, length) in enumerate(zip(flags, first, lengths, strict=True)):
            if not row[at : at + length].all():  # some lie further on
                runs = np.count_nonzero(np.diff(row.astype(np.int8), prepend=0) == 1)
                raise ValueError(
                    f"TokenLayout.from_mask: row {index} has {runs} runs of real tokens, expected "
                    "one; a hole cannot be packed"
                )
        starts = tuple((np.arange(len(flags)) * width + first).tolist())
        return cls(tuple(lengths.tolist()), cp_size, tp_size, align, starts)

    # lengths ------------------------------------------------------------------------------------

    @cached_property
    def padded_seqlens(self) -> tuple[int, ...]:
        """[S] rows of each sequence with its padding."""
        return tuple(self._padded.tolist())

    @cached_property
    def num_tokens(self) -> int:
        """Real rows T, over all ranks."""
        return sum(self.seqlens)

    @cached_property
    def num_local(self) -> int:
        """Rows a CP rank holds, padding included, before the TP slice."""
        return int(self._padded.sum()) // self.cp_size

    @cached_property
    def max_padded_seqlen(self) -> int:
        """Rows of the longest padded sequence, 0 without sequences."""
        return max(self.padded_seqlens, default=0)

    @_kept
    def cu_seqlens(self, padded: bool, capacity: int | None = None) -> Tensor:
        """[S + 1] int32 first row of each sequence, and the end, in ragged or packed order.

        With ``capacity`` [capacity + 1], the end repeated: sequences without rows follow.

        Raises:
            ValueError: more than 2**31 - 1 rows, or more than ``capacity`` sequences.
        """
        lengths = self._padded if padded else self._lengths
        size = self._capacity("cu_seqlens", len(lengths), "sequences", capacity)
        ends = np.zeros(size + 1, dtype=np.int64)
        np.cumsum(lengths, out=ends[1 : len(lengths) + 1])
        ends[len(lengths) + 1 :] = ends[len(lengths)]
        if ends[-1] > np.iinfo(np.int32).max:
            raise ValueError(f"TokenLayout.cu_seqlens: {ends[-1]} rows, expected at most 2**31 - 1")
        return torch.from_numpy(ends.astype(np.int32))

    # index vectors ------------------------------------------------------------------------------

    @_kept
    def rows(self, cp_rank: int, tp_rank: int | None = None, capacity: int | None = None) -> Tensor:
        """[num_local] int64 row of the source stream held in each local row, -1 in padding.

        With ``tp_rank`` the contiguous ``1 / tp_size`` of it that sequence parallelism keeps.
        With ``capacity``, a multiple of ``tp_size``, [capacity] before that part is taken: -1 in
        the rows that this batch leaves over.

        Raises:
            ValueError: a rank or ``capacity`` does not fit.
        """
        size = self._capacity("rows", self.num_local, "rows", capacity)
        if tp_rank is None:
            return _expand(*self._runs(cp_rank, self._sources), size)
        self._check_rank("tp", tp_rank)
        if size % self.tp_size:
            raise ValueError(
                f"TokenLayout.rows: capacity is {size}, expected a multiple of tp_size "
                f"{self.tp_size}"
            )
        part = size // self.tp_size
        whole = self.rows(cp_rank) if capacity is None else self.rows(cp_rank, None, capacity)
        return whole[tp_rank * part : (tp_rank + 1) * part]

    @_kept
    def positions(self, cp_rank: int, capacity: int | None = None) -> Tensor:
        """[num_local] int64 position of each local row in its sequence, padding counted on.

        With ``capacity`` [capacity], -1 in the rows that this batch leaves over; more local rows
        than that are a ValueError.
        """
        size = self._capacity("positions", self.num_local, "rows", capacity)
        return _expand(*self._chunks(cp_rank), size)

    @_kept
    def inverse(self) -> Tensor:
        """[T] int64 row of the gathered order that holds each real token, in ragged order."""
        return self._gathered(self._lengths)

    @_kept
    def inverse_rows(self, cp_rank: int) -> Tensor:
        """[T] int64 local row of a rank that holds each real token, in ragged order, or -1.

        By it one gather puts what a rank computed back into the ragged stream, with the fill
        where another rank holds the token.
        """
        self._check_rank("cp", cp_rank)
        return self._gathered(self._lengths, of=cp_rank)

    @_kept
    def gathered_rows(self) -> Tensor:
        """[cp_size * num_local] int64 ragged row in each row of the gathered order, -1 in padding.

        What :meth:`inverse` undoes, and the way its gradient goes back.
        """
        ragged = np.cumsum(self._lengths) - self._lengths
        tables = zip(*(self._runs(r, ragged) for r in range(self.cp_size)), strict=True)
        starts, lengths = map(np.concatenate, tables)
        return _expand(starts, lengths, self.cp_size * self.num_local)

    @_kept
    def global_order(self) -> Tensor:
        """[cp_size * num_local] int64 row of the gathered order that holds each packed row."""
        return self._gathered(self._padded)

    @_kept
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

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.asarray(self.seqlens, dtype=np.int64)

    @cached_property
    def _padded(self) -> np.ndarray:
        zigzag = 1 if self.cp_size == 1 else 2 * self.cp_size
        unit = lcm(zigzag * self.tp_size, self.align)
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
        """Where in its sequence each chunk of this rank begins, and its rows, in local order."""
        self._check_rank("cp", cp_rank)
        if self.cp_size == 1:
            return np.zeros_like(self._padded), self._padded
        chunk = self._padded // (2 * self.cp_size)
        mirrored = 2 * self.cp_size - 1 - cp_rank
        return _interleave(cp_rank * chunk, mirrored * chunk), _interleave(chunk, chunk)

    def _runs(self, cp_rank: int, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of every run of a rank's rows; sequence s begins at ``sources[s]``."""
        at, size = self._chunks(cp_rank)
        chunks = 1 if self.cp_size == 1 else 2
        real = np.clip(np.repeat(self._lengths, chunks) - at, 0, size)
        starts = np.repeat(sources, chunks) + at
        return _interleave(starts, np.full_like(starts, -1)), _interleave(real, size - real)

    def _gathered(self, lengths: np.ndarray, of: int | None = None) -> Tensor:
        """Gathered row of the first ``lengths[s]`` rows of each packed sequence s.

        With ``of`` the local row of that rank, -1 where another holds it.
        """
        first = (np.cumsum(self._padded) - self._padded)[:, None] // self.cp_size
        if self.cp_size == 1:
            return _expand(first, lengths, int(lengths.sum()))
        chunk = self._padded[:, None] // (2 * self.cp_size)
        k = np.arange(2 * self.cp_size)
        rank = np.minimum(k, 2 * self.cp_size - 1 - k)
        local = first + np.where(k < self.cp_size, 0, chunk)
        starts = rank * self.num_local + local if of is None else np.where(rank == of, local, -1)
        kept = np.clip(lengths[:, None] - k * chunk, 0, chunk)
        return _expand(starts, kept, int(lengths.sum()))

    def _capacity(self, function: str, used: int, what: str, capacity: int | None) -> int:
        if capacity is None:
            return used
        if used > capacity:
            raise ValueError(
                f"TokenLayout.{function}: {used} {what}, expected at most the capacity of "
                f"{capacity}. Raise the capacity, or put fewer samples in a microbatch"
            )
        return capacity
