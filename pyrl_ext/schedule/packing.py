"""Which samples run together, and on which rank: the one algorithm of trainer and forecast.

Bins (one microbatch of one rank each) are filled longest sample first into the emptiest bin, which
keeps the fullest bin within 4/3 of the best possible [1]. Where that overflows the token limit,
first fit decreasing packs tighter, and is within the same bound: an overflow shows that the best
possible fullest bin holds more than 3/4 of the limit.

[1] R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Schedule = tuple[tuple[tuple[int, ...], ...], ...]


def pack_samples(loads: Sequence[int], dp_size: int, limit: int) -> Schedule:
    """Assign samples to the microbatches of every data-parallel rank, balanced and deterministic.

    All ranks get the same number of microbatches, the smallest that the filling above finds.
    Microbatch m holds bins of similar load on all ranks, since expert parallelism makes ranks wait
    for each other within a microbatch.

    Args:
        loads: padded rows of each sample, each at most ``limit`` [tokens].
        dp_size: data-parallel ranks.
        limit: most padded rows of a microbatch of one rank [tokens].

    Returns:
        [dp_size][microbatches] sample ids, ascending. A microbatch is empty only if there are fewer
        samples than dp_size * microbatches.
    """
    longest_first = sorted(range(len(loads)), key=lambda i: -loads[i])
    per_rank = max(1, -(-sum(loads) // (dp_size * limit)))
    while True:
        bins: list[list[int]] | None = emptiest_first(loads, longest_first, dp_size * per_rank)
        if max(sum(loads[i] for i in ids) for ids in bins) > limit:
            bins = _first_fit(loads, longest_first, dp_size * per_rank, limit)
        if bins is not None:
            return _deal(loads, bins, dp_size)
        per_rank += 1


def emptiest_first(
    loads: Sequence[int], longest_first: list[int], num_bins: int
) -> list[list[int]]:
    """Put each sample into the emptiest bin; the token limit is ignored."""
    heap = [(0, b) for b in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in longest_first:
        load, b = heap[0]
        bins[b].append(sample)
        heapq.heapreplace(heap, (load + loads[sample], b))
    return bins


def _first_fit(
    loads: Sequence[int], longest_first: list[int], num_bins: int, limit: int
) -> list[list[int]] | None:
    """Put each sample into the first bin with room for it; None if some sample finds none."""
    leaves = 1 << (num_bins - 1).bit_length()
    # a binary tree: room[leaves + b] is the room of bin b, an inner node the most below it
    room = [0] * leaves + [limit] * num_bins + [0] * (leaves - num_bins)
    for node in reversed(range(1, leaves)):
        room[node] = max(room[2 * node], room[2 * node + 1])
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in longest_first:
        load = loads[sample]
        node = 1
        if room[1] < load:
            return None
        while node < leaves:
            node = 2 * node + (room[2 * node] < load)
        room[node] -= load
        bins[node - leaves].append(sample)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    for ids in bins:  # an empty bin takes a sample of the fullest bin that can spare one
        spare = [other for other in bins if len(other) > 1]
        if not ids and spare:
            ids.append(max(spare, key=lambda other: sum(loads[i] for i in other)).pop())
    return bins


def _deal(loads: Sequence[int], bins: list[list[int]], dp_size: int) -> Schedule:
    """Deal bins to ranks, fullest first, back and forth so that the ranks' totals even out."""
    fullest = sorted(bins, key=lambda ids: -sum(loads[i] for i in ids))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    for first in range(0, len(fullest), dp_size):
        turn = fullest[first : first + dp_size]
        if (first // dp_size) % 2:
            turn.reverse()
        for rank, ids in zip(ranks, turn, strict=True):
            rank.append(tuple(sorted(ids)))
    return tuple(map(tuple, ranks))
