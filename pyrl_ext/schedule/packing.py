"""Which samples run together, and on which rank: what forecasts use, and the trainer tries first.

Bins (one microbatch of one rank each) are filled longest sample first, each sample into the bin of
least work that has room for it. Where no bin has room, first fit decreasing packs tighter. If the
work of a sample is its rows, the fullest bin is within 4/3 of the best possible [1]: first fit runs
only where the best possible fullest bin holds more than 3/4 of the limit.

[1] R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Schedule = tuple[tuple[tuple[int, ...], ...], ...]


def pack_samples(
    loads: Sequence[int], dp_size: int, limit: int, work: Sequence[float] | None = None
) -> Schedule:
    """Assign samples to the microbatches of every data-parallel rank, balanced and deterministic.

    All ranks get the same number of microbatches, the smallest that the filling above finds.
    Microbatch m holds bins of similar work on all ranks, since expert parallelism makes ranks wait
    for each other within a microbatch.

    Args:
        loads: padded rows of each sample, each at most ``limit`` [tokens].
        dp_size: data-parallel ranks.
        limit: most padded rows of a microbatch of one rank [tokens].
        work: time of each sample in any unit, more for longer ones; None: ``loads``.

    Returns:
        [dp_size][microbatches] sample ids, ascending. A microbatch is empty only if there are fewer
        samples than dp_size * microbatches.
    """
    work = loads if work is None else work
    longest_first = sorted(range(len(loads)), key=lambda i: -loads[i])
    per_rank = max(1, -(-sum(loads) // (dp_size * limit)))
    while True:
        num_bins = dp_size * per_rank
        bins = least_work_first(loads, work, longest_first, num_bins, limit)
        if bins is None:
            bins = _first_fit(loads, longest_first, num_bins, limit)
        if bins is not None:
            return _deal(work, bins, dp_size)
        per_rank += 1


def equal_parts(work: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide samples into parts of equally many, with about equal work: longest first, each into
    the part of least work that is not full.

    Args:
        work: time of each sample in any unit.
        num_parts: divides the number of samples.

    Returns: [num_parts] sample ids, ascending.
    Raises: ValueError if ``num_parts`` is below 1 or does not divide the number of samples.
    """
    if num_parts < 1 or len(work) % num_parts:
        raise ValueError(
            f"equal_parts: {len(work)} samples and num_parts {num_parts}, expected a positive "
            "number of parts that divides the number of samples"
        )
    ones = [1] * len(work)
    longest_first = sorted(range(len(work)), key=lambda i: -work[i])
    parts = least_work_first(ones, work, longest_first, num_parts, len(work) // num_parts)
    assert parts is not None  # there is room for all
    return [sorted(ids) for ids in parts]


def least_work_first(
    loads: Sequence[int],
    work: Sequence[float],
    longest_first: Sequence[int],
    num_bins: int,
    limit: int,
) -> list[list[int]] | None:
    """Put each sample into the bin of least work with room for it; None if some sample finds none.

    Samples get shorter, so a bin without room waits until one comes that fits.
    """
    open_bins = [(0.0, b) for b in range(num_bins)]  # a heap: work, bin
    waiting: list[tuple[int, float, int]] = []  # a heap: minus the room, work, bin
    room = [limit] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in longest_first:
        load = loads[sample]
        while waiting and -waiting[0][0] >= load:
            heapq.heappush(open_bins, heapq.heappop(waiting)[1:])
        while open_bins and room[open_bins[0][1]] < load:
            done, b = heapq.heappop(open_bins)
            heapq.heappush(waiting, (-room[b], done, b))
        if not open_bins:
            return None
        done, b = open_bins[0]
        bins[b].append(sample)
        room[b] -= load
        heapq.heapreplace(open_bins, (done + work[sample], b))
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


def _deal(work: Sequence[float], bins: list[list[int]], dp_size: int) -> Schedule:
    """Deal bins to ranks, most work first, back and forth so that the ranks' totals even out."""
    fullest = sorted(bins, key=lambda ids: -sum(work[i] for i in ids))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    for first in range(0, len(fullest), dp_size):
        turn = fullest[first : first + dp_size]
        if (first // dp_size) % 2:
            turn.reverse()
        for rank, ids in zip(ranks, turn, strict=True):
            rank.append(tuple(sorted(ids)))
    return tuple(map(tuple, ranks))
