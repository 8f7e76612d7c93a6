"""Schedule: the samples and ranks of every microbatch."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Group(NamedTuple):
    """The ranks that run some samples together in one microbatch.

    Args:
        first: first of its ranks in the grid of data- and context-parallel ranks, where rank
            ``dp_rank * cp_size + cp_rank`` counts. A multiple of ``cp_size``.
        cp_size: number of its ranks, which share the rows of its samples.
        samples: ids, ascending. Without samples it computes padding, so that its ranks take part
            in the collectives of the others.
    """

    first: int
    cp_size: int
    samples: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """Its ranks in the grid."""
        return range(self.first, self.first + self.cp_size)


Microbatch = tuple[Group, ...]


@dataclass(frozen=True)
class Schedule:
    """Microbatches in their order, the same on every rank.

    Args:
        num_ranks: ranks of the grid, data-parallel times context-parallel.
        microbatches: groups of each microbatch by their first rank; together they hold every rank
            of the grid once.
        makespan: cost of the slowest rank of each microbatch, summed; nan without a cost model.
        lower_bound: total cost over the number of ranks; nan without a cost model.
    """

    num_ranks: int
    microbatches: tuple[Microbatch, ...]
    makespan: float = math.nan
    lower_bound: float = math.nan

    def __len__(self) -> int:
        return len(self.microbatches)

    def group_of(self, microbatch: int, rank: int) -> Group:
        """The group of grid rank ``rank`` in a microbatch."""
        groups = self.microbatches[microbatch]
        return groups[bisect_right(groups, rank, key=lambda group: group.first) - 1]

    @property
    def samples(self) -> list[int]:
        """All sample ids, microbatch by microbatch."""
        return [i for groups in self.microbatches for group in groups for i in group.samples]

    @property
    def digest(self) -> int:
        """32 bits, equal for equal schedules."""
        return zlib.crc32(repr(self.microbatches).encode())

    def renumbered(self, ids: Sequence[int]) -> Schedule:
        """The same microbatches, with sample ``ids[i]`` in place of sample i."""
        moved = (
            tuple(g._replace(samples=tuple(ids[i] for i in g.samples)) for g in groups)
            for groups in self.microbatches
        )
        return replace(self, microbatches=tuple(moved))

    def padded(self, multiple: int) -> Schedule:
        """With microbatches of padding at the end, so that ``multiple`` divides their number."""
        empty = tuple(group._replace(samples=()) for group in self.microbatches[-1])
        missing = -len(self) % multiple
        return replace(self, microbatches=self.microbatches + (empty,) * missing)
