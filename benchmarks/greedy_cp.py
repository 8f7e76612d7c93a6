"""Greedy schedulers of dynamic context parallelism, modelled after megatron-core's.

Written from a description of what they do; their errors, such as groups at unaligned ranks, are
left out. All of them take samples in order of length, longest first. A sample needs the smallest
power of two of ranks at which its part of a rank is within the token limit. It joins the least
loaded group of that size, or opens one where ranks are free and that is less loaded. When no sample
finds a place, groups are doubled, smallest first, until no rank is idle. Load is the squared length
of a sample over its ranks. They differ in three respects.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Groups = list[tuple[int, tuple[int, ...]]]
"""Size and sample ids of every group of a microbatch."""

BALANCED = 0.05
"""Groups whose loads differ by less than this share are balanced."""


class Greedy(NamedTuple):
    """A scheduler."""

    token_limit: bool
    """A group holds no more tokens than its ranks may; otherwise only single samples are checked.
    """
    stops_balanced: bool
    """A microbatch ends as soon as its groups are balanced and smaller samples have begun."""
    larger_groups: bool
    """A sample joins groups larger than it needs, too."""

    def plan(self, lengths: Sequence[int], num_ranks: int, limit: int) -> list[Groups]:
        """Groups of every microbatch; `limit` is in tokens on a rank."""
        left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        plan = []
        while left:
            micro = _Microbatch(self, lengths, num_ranks, limit)
            left = micro.take(left)
            micro.double()
            plan.append([(group.size, tuple(group.samples)) for group in micro.groups])
        return plan


GREEDY = {
    "0.19.2": Greedy(token_limit=False, stops_balanced=True, larger_groups=False),
    "as merged": Greedy(token_limit=True, stops_balanced=True, larger_groups=False),
    "dev": Greedy(token_limit=True, stops_balanced=False, larger_groups=True),
}


@dataclass
class _Group:
    size: int
    samples: list[int] = field(default_factory=list)
    tokens: int = 0
    load: float = 0.0


class _Microbatch:
    def __init__(self, how: Greedy, lengths: Sequence[int], num_ranks: int, limit: int) -> None:
        self.how = how
        self.lengths = lengths
        self.limit = limit
        self.free = num_ranks
        self.groups: list[_Group] = []
        self.by_load: dict[int, list[tuple[float, int]]] = {}  # size -> heap of (load, group)

    def take(self, left: list[int]) -> list[int]:
        """Place samples in order and return those that find no place."""
        waiting = []
        largest = self._needed(left[0])
        for at, i in enumerate(left):
            needed = self._needed(i)
            if self.how.stops_balanced and needed < largest and self._balanced():
                return waiting + left[at:]
            if not self._place(i, needed):
                waiting.append(i)
                if not self.free and self._full():
                    return waiting + left[at + 1 :]
        return waiting

    def _needed(self, i: int) -> int:
        size = 1
        while size * self.limit < self.lengths[i]:
            size *= 2
        return size

    def _balanced(self) -> bool:
        loads = [group.load for group in self.groups]
        return not self.free and max(loads) - min(loads) <= BALANCED * max(loads)

    def _full(self) -> bool:
        return self.how.token_limit and all(
            group.tokens >= 0.98 * group.size * self.limit for group in self.groups
        )

    def _place(self, i: int, needed: int) -> bool:
        sizes = [s for s in self.by_load if s == needed or (s > needed and self.how.larger_groups)]
        if self.free >= needed:
            self.free -= needed
            self.groups.append(_Group(needed))
            return self._join(i, len(self.groups) - 1)
        for size in sorted(sizes):
            skipped = []
            heap = self.by_load[size]
            while heap:
                load, g = heapq.heappop(heap)
                room = size * self.limit - self.groups[g].tokens
                if not self.how.token_limit or self.lengths[i] <= room:
                    for each in skipped:
                        heapq.heappush(heap, each)
                    return self._join(i, g)
                skipped.append((load, g))
            self.by_load[size] = skipped
            heapq.heapify(skipped)
        return False

    def _join(self, i: int, g: int) -> bool:
        group = self.groups[g]
        group.samples.append(i)
        group.tokens += self.lengths[i]
        group.load += self.lengths[i] ** 2 / group.size
        heapq.heappush(self.by_load.setdefault(group.size, []), (group.load, g))
        return True

    def double(self) -> None:
        """Give free ranks to the smallest groups that can be doubled."""
        heap = [(group.size, g) for g, group in enumerate(self.groups)]
        heapq.heapify(heap)
        while heap and heap[0][0] <= self.free:
            size, g = heapq.heappop(heap)
            self.free -= size
            self.groups[g].size = 2 * size
            heapq.heappush(heap, (2 * size, g))
