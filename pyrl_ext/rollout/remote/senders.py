"""The ranks that send weights to remote engines, and what each of them sends."""

from __future__ import annotations

from collections.abc import Sequence

from pyrl_ext.plan.model.ranks import Grid


def senders_of(grid: Grid, senders: int, buckets: Sequence[tuple[int, int]]) -> list[int]:
    """The rank that sends each bucket.

    The senders are spread over the ranks evenly, and so over stages and hosts. A stage's buckets go
    to the senders on it; those of a stage without one go to all. Each goes to the sender that has
    the fewest bytes so far.

    Args:
        grid: of the language model
        senders: number of ranks that send
        buckets: (pipeline stage, bytes) of each, in the order in which they are gathered
    """
    ranks = [grid.ranks[i * len(grid.ranks) // senders] for i in range(senders)]
    stages = {rank: grid.place(rank).pp for rank in ranks}
    load = dict.fromkeys(ranks, 0)
    found = [grid.first] * len(buckets)
    has_none = [stage not in stages.values() for stage, _ in buckets]
    for number in sorted(range(len(buckets)), key=has_none.__getitem__):
        stage, size = buckets[number]
        near = [rank for rank in ranks if has_none[number] or stages[rank] == stage]
        found[number] = min(near, key=load.__getitem__)
        load[found[number]] += size
    return found
