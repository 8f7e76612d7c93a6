"""Which samples run together, and on which rank: pure functions of lengths.

The load of a sample is its length padded to the layout's alignment. Bins (one microbatch of one
rank each) are filled longest sample first into the emptiest bin, which keeps the fullest bin
within 4/3 of the best possible [1]; where that overflows the token limit, first fit decreasing
packs tighter, and is within the same bound, since overflow shows that the best possible is more
than 3/4 of the limit.

[1] R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Schedule = tuple[tuple[tuple[int, ...], ...], ...]

__all__ = ["Schedule", "balance_ratio", "plan_microbatches"]


def plan_microbatches(
    seqlens: Sequence[int], dp_size: int, tokens_per_microbatch: int, align: int = 1
) -> Schedule:
    """Samples of every microbatch of every data-parallel rank, deterministic and balanced.

    Ranks have the same number of microbatches, the smallest that the filling above finds.
    Microbatch m holds bins of like load on all ranks, since expert parallelism makes ranks wait
    for each other within a microbatch.

    Args:
        seqlens: rows of each sample [tokens].
        dp_size: data-parallel ranks.
        tokens_per_microbatch: most padded rows of a microbatch of one rank [tokens].
        align: every sample is padded to a multiple of this [tokens].

    Returns:
        [dp_size][microbatches] sample ids, ascending. A microbatch is empty only where there are
        fewer samples than dp_size * microbatches.

    Raises:
        ValueError: a sample does not fit into a microbatch alone, or a size is not positive.
    """
    _check_sizes(seqlens, dp_size, tokens_per_microbatch, align)
    loads = _padded(seqlens, align)
    order = np.argsort(-loads, kind="stable")
    per_rank = max(1, -(-int(loads.sum()) // (dp_size * tokens_per_microbatch)))
    while True:
        bins = _emptiest_first(loads, order, dp_size * per_rank)
        if max(_load(loads, b) for b in bins) > tokens_per_microbatch:
            bins = _first_fit(loads, order, dp_size * per_rank, tokens_per_microbatch)
        if bins is not None:
            return _deal(loads, bins, dp_size)
        per_rank += 1


def balance_ratio(schedule: Schedule, seqlens: Sequence[int], align: int = 1) -> float:
    """Sum over microbatches of the fullest rank's rows, over all rows / ranks; 1 is perfect.

    Args:
        schedule: [dp_size][microbatches] sample ids.
        seqlens: rows of each sample [tokens].
        align: padding multiple of a sample [tokens].
    """
    loads = _padded(seqlens, align)
    table = np.array([[_load(loads, ids) for ids in rank] for rank in schedule])
    return float(table.max(axis=0).sum() * len(schedule) / table.sum())


def _check_sizes(seqlens: Sequence[int], dp_size: int, limit: int, align: int) -> None:
    sizes = {"dp_size": dp_size, "tokens_per_microbatch": limit, "align": align}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"plan_microbatches: {name} is {value}, expected at least 1")
    if not len(seqlens):
        raise ValueError("plan_microbatches: 0 samples, expected at least 1")
    for sample, n in enumerate(seqlens):
        padded = -(-n // align) * align
        if n < 1:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows, expected at least 1"
            )
        if padded > limit:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows ({padded} padded to a multiple "
                f"of {align}), expected at most tokens_per_microbatch = {limit}. Raise "
                "batching.tokens_per_microbatch or shorten the responses"
            )


def _padded(seqlens: Sequence[int], align: int) -> np.ndarray:
    """[S] int64, each length rounded up to a multiple of ``align``."""
    return -(-np.asarray(seqlens, dtype=np.int64) // align) * align


def _load(loads: np.ndarray, ids: Sequence[int]) -> int:
    return int(loads[list(ids)].sum())


def _emptiest_first(loads: np.ndarray, order: np.ndarray, num_bins: int) -> list[list[int]]:
    """Each sample into the bin that is emptiest; the token limit is not looked at."""
    heap = [(0, b) for b in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in order.tolist():
        load, b = heap[0]
        bins[b].append(sample)
        heapq.heapreplace(heap, (load + int(loads[sample]), b))
    return bins


def _first_fit(
    loads: np.ndarray, order: np.ndarray, num_bins: int, limit: int
) -> list[list[int]] | None:
    """Each sample into the first bin with room for it; None if some sample finds none."""
    held = np.zeros(num_bins, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in order.tolist():
        room = held + loads[sample] <= limit
        b = int(room.argmax())
        if not room[b]:
            return None
        held[b] += loads[sample]
        bins[b].append(sample)
    for b in range(num_bins):  # an empty bin takes a sample of the fullest bin that can spare one
        spare = [c for c in range(num_bins) if len(bins[c]) > 1]
        if not bins[b] and spare:
            bins[b].append(bins[max(spare, key=lambda c: _load(loads, bins[c]))].pop())
    return bins


def _deal(loads: np.ndarray, bins: list[list[int]], dp_size: int) -> Schedule:
    """Bins to ranks, fullest first, back and forth so that the ranks' totals even out."""
    fullest = sorted(bins, key=lambda ids: -_load(loads, ids))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    for first in range(0, len(fullest), dp_size):
        turn = fullest[first : first + dp_size]
        if (first // dp_size) % 2:
            turn.reverse()
        for rank, ids in zip(ranks, turn, strict=True):
            rank.append(tuple(sorted(ids)))
    return tuple(map(tuple, ranks))
