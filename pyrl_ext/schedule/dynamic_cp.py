"""Dynamic context parallelism: which samples run together, on how many ranks, in which microbatch.

A group of c ranks, the first of them a multiple of c, runs whole samples. Microbatches are built
one after the other, longest remaining sample first. Each is built for several limits of a group's
time, and the most efficient one is kept:

1. A sample opens a group of the smallest size that meets the time limit, if there are ranks left.
   Otherwise it joins the group that is then the least loaded, if that meets the time limit and the
   token limit; otherwise it waits for a later microbatch.
2. While ranks are left, the slowest group takes the next larger size if that makes it faster, and
   step 1 is repeated.

Efficiency is (work placed + weight x tokens placed) / (time of the slowest group + weight x tokens
that fit), both relative to a mean microbatch: a larger weight makes fewer microbatches. Whole plans
are built for a few weights and smallest group sizes, and the one with the least total time wins.
For few samples all plans are looked at (`few_samples`).

Every sum of floats is a plain loop: `sum` rounds in another way, and C++ has to agree.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pyrl_ext.schedule.cp_problem import CpInstance
from pyrl_ext.schedule.few_samples import best_plan, is_few
from pyrl_ext.schedule.schedule import Group, Microbatch, Schedule

TIMES = (0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.45, 1.7)
"""Time limits of a microbatch, relative to an even share of the samples that its tokens allow."""
WEIGHTS = ((64, (0.0, 0.1, 0.3, 1.0, 3.0)), (1024, (0.1, 0.5)), (None, (0.3,)))
"""Weights tried, up to a number of samples."""
BASES = ((64, 99), (1024, 3), (None, 2))
"""Smallest group sizes tried, up to a number of samples: the first so many of the group sizes."""
SLACK = (1.0, 1.02, 1.06, 1.12)
"""Token limits tried for a prescribed number of microbatches, relative to an even share."""


def tried[T](table: Sequence[tuple[int | None, T]], samples: int) -> T:
    """The entry of WEIGHTS or BASES for a number of samples."""
    return next(entry for up_to, entry in table if up_to is None or samples <= up_to)


def search(problem: CpInstance) -> Schedule:
    """Plan the microbatches of a problem that `CpGroups` has checked."""
    return _Search(problem).best()


@dataclass(slots=True)
class _Group:
    index: int
    size: int  # index into Problem.sizes
    load: float  # seconds
    rows: int  # padded
    samples: list[int]  # positions in order of length


@dataclass(slots=True)
class _Microbatch:
    """A microbatch while it is built."""

    left: list[int]  # positions of samples not placed, longest first
    free: int  # ranks
    groups: list[_Group] = field(default_factory=list)
    by_load: list[list[tuple[float, int]]] = field(default_factory=list)  # of every size

    def time(self) -> float:
        return max((group.load for group in self.groups), default=0.0)


class _Variant(NamedTuple):
    weight: float
    base: int
    share: float


class _Search:
    """The tables of a problem: samples are named by their position, longest first."""

    def __init__(self, problem: CpInstance) -> None:
        self.problem = problem
        self.sizes = problem.sizes
        self.order = sorted(range(len(problem.lengths)), key=lambda i: -problem.lengths[i])
        lengths = [problem.lengths[i] for i in self.order]
        self.rows = [[-(-n // s.unit) * s.unit for n in lengths] for s in self.sizes]
        self.cost = [
            [s.token * n + s.square * n * n for n in rows]
            for s, rows in zip(self.sizes, self.rows, strict=True)
        ]
        # tokens; seconds of one rank that did all the work
        self.least_rows = []
        self.work = []
        for x in range(len(lengths)):
            fits = [k for k, s in enumerate(self.sizes) if self.rows[k][x] <= s.limit]
            self.least_rows.append(min(self.rows[k][x] for k in fits))
            self.work.append(min(self.cost[k][x] * self.sizes[k].size for k in fits))
        self.capacity = max(problem.num_ranks * s.limit // s.size for s in self.sizes)
        self.fewest = -(-sum(self.least_rows) // self.capacity)
        self.mean = self._total(range(len(lengths))) / problem.num_ranks / self.fewest

    def _total(self, positions: Iterator[int] | Sequence[int]) -> float:
        total = 0.0
        for x in positions:
            total += self.work[x]
        return total

    # Whole plans --------------------------------------------------------------------------------

    def best(self) -> Schedule:
        plans = [self._best_of_all()] if is_few(self.problem) else map(self._plan, self._variants())
        plan = min(plans, key=self._makespan)
        placed = tuple(map(self._placed, plan))
        costs = self._makespan(plan), self._lower_bound()
        return Schedule(self.problem.num_ranks, placed, *costs)

    def _best_of_all(self) -> list[_Microbatch]:
        plan = []
        for groups in best_plan(self.problem, self.cost, self.rows):
            micro = _Microbatch([], 0)
            for size, samples in groups:
                load, rows = self._load(size, samples)
                micro.groups.append(_Group(len(micro.groups), size, load, rows, samples))
            plan.append(micro)
        self._split(plan)
        return plan

    def _variants(self) -> Iterator[_Variant]:
        multiple = self.problem.multiple
        shares = [1.0]
        if multiple > 1:
            target = -(-self.fewest // multiple) * multiple
            shares = [min(1.0, self.fewest / target * slack) for slack in SLACK]
        bases = min(tried(BASES, len(self.order)), len(self.sizes))
        for share in shares:
            for base in range(bases):
                for weight in tried(WEIGHTS, len(self.order)):
                    yield _Variant(weight, base, share)

    def _plan(self, variant: _Variant) -> list[_Microbatch]:
        plan = []
        left = list(range(len(self.order)))
        while left:
            built = [self._build(left, time, variant) for time in self._times(left)]
            best = max(built, key=partial(self._efficiency, variant.weight))
            plan.append(best)
            left = best.left
        self._split(plan)
        return plan

    def _makespan(self, plan: list[_Microbatch]) -> float:
        total = 0.0
        for each in plan:
            total += self.problem.launch + each.time()
        return total

    def _lower_bound(self) -> float:
        multiple = self.problem.multiple
        launch = self.problem.launch
        fewest = -(-self.fewest // multiple) * multiple
        work = self._total(range(len(self.order))) / self.problem.num_ranks
        return launch * fewest + max(work, min(self._alone(0)))

    def _split(self, plan: list[_Microbatch]) -> None:
        """Halve microbatches, those of most samples first, until their number is a multiple."""
        while len(plan) % self.problem.multiple:
            counts = [sum(len(group.samples) for group in each.groups) for each in plan]
            at = counts.index(max(counts))
            if counts[at] < 2:
                plan.append(_Microbatch([], self.problem.num_ranks))
                continue
            plan[at : at + 1] = self._halves(plan[at])

    def _halves(self, whole: _Microbatch) -> tuple[_Microbatch, _Microbatch]:
        """Every group deals its samples to the same ranks of two microbatches."""
        halves = _Microbatch([], whole.free), _Microbatch([], whole.free)
        turn = 0
        for group in whole.groups:
            parts: tuple[list[int], list[int]] = ([], [])
            for x in group.samples:
                parts[turn].append(x)
                turn = 1 - turn
            for half, part in zip(halves, parts, strict=True):
                load, rows = self._load(group.size, part)
                half.groups.append(_Group(len(half.groups), group.size, load, rows, part))
        return halves

    def _placed(self, micro: _Microbatch) -> Microbatch:
        """Larger groups first, so that each begins at a multiple of its size."""
        found = []
        first = 0
        least = self.sizes[0].size
        for group in sorted(micro.groups, key=lambda group: -group.size):
            samples = tuple(sorted(self.order[x] for x in group.samples))
            found.append(Group(first, self.sizes[group.size].size, samples))
            first += self.sizes[group.size].size
        empty = range(first, self.problem.num_ranks, least)
        return (*found, *(Group(at, least, ()) for at in empty))

    # One microbatch -----------------------------------------------------------------------------

    def _times(self, left: list[int]) -> list[float]:
        """Time limits to try, ascending; the longest sample meets all of them."""
        rows = 0
        work = 0.0
        for x in left:
            rows += self.least_rows[x]
            if rows > self.capacity:
                break
            work += self.work[x]
        even = work / self.problem.num_ranks
        alone = self._alone(left[0])
        least = min(alone)
        return sorted({*alone, *(max(least, even * share) for share in TIMES)})

    def _alone(self, x: int) -> list[float]:
        """Seconds of a sample in a group of its own, of every size that takes it."""
        return [
            s.fixed + self.cost[k][x]
            for k, s in enumerate(self.sizes)
            if self.rows[k][x] <= s.limit
        ]

    def _efficiency(self, weight: float, micro: _Microbatch) -> float:
        work = 0.0
        rows = 0
        for group in micro.groups:
            for x in group.samples:
                work += self.work[x]
                rows += self.least_rows[x]
        tokens = weight * self.mean
        gained = work / self.problem.num_ranks + tokens * (rows / self.capacity)
        time = micro.time() + self.problem.launch + tokens
        return gained / time if time else 0.0  # nothing met the time limit, and launches are free

    def _build(self, left: list[int], time: float, variant: _Variant) -> _Microbatch:
        micro = _Microbatch(left, self.problem.num_ranks, by_load=[[] for _ in self.sizes])
        self._fill(micro, time, variant)
        while micro.free and self._grow(micro):
            self._fill(micro, time, variant)
        return micro

    def _fill(self, micro: _Microbatch, time: float, variant: _Variant) -> None:
        """Step 1. The samples that fit nowhere are skipped by bisection: a shorter one fits
        wherever a longer one does."""
        at = 0
        given = micro.left
        left = []
        while at < len(given):
            x = given[at]
            size = self._opens(micro, x, time, variant.base)
            if size is not None:
                self._open(micro, x, size)
            elif (found := self._least_loaded(micro, x, time, variant.share)) is not None:
                self._join(micro, x, *found)
            else:
                then = bisect_left(
                    given, True, at + 1, key=partial(self._fits, micro, time, variant)
                )
                left += given[at:then]
                at = then
                continue
            at += 1
        micro.left = left

    def _opens(self, micro: _Microbatch, x: int, time: float, base: int) -> int | None:
        """The smallest size of a new group for a sample, if ranks are left for it."""
        while base and self.sizes[base].size > micro.free:
            base -= 1
        for k in range(base, len(self.sizes)):
            size = self.sizes[k]
            if size.size > micro.free:
                return None
            if self.rows[k][x] <= size.limit and size.fixed + self.cost[k][x] <= time:
                return k
        return None

    def _open(self, micro: _Microbatch, x: int, size: int) -> None:
        load = self.sizes[size].fixed + self.cost[size][x]
        group = _Group(len(micro.groups), size, load, self.rows[size][x], [x])
        micro.groups.append(group)
        micro.free -= self.sizes[size].size
        insort(micro.by_load[size], (load, group.index))

    def _least_loaded(
        self, micro: _Microbatch, x: int, time: float, share: float
    ) -> tuple[float, float, int] | None:
        """(load with a sample, load, index) of the group that is then the least loaded."""
        best: tuple[float, float, int] | None = None
        for k, by_load in enumerate(micro.by_load):
            cost = self.cost[k][x]
            most = int(self.sizes[k].limit * share) - self.rows[k][x]
            for load, index in by_load:
                after = load + cost
                if after > time or (best is not None and after > best[0]):
                    break
                if micro.groups[index].rows <= most:
                    found = after, load, index
                    best = found if best is None else min(best, found)
                    break
        return best

    def _join(self, micro: _Microbatch, x: int, after: float, load: float, index: int) -> None:
        group = micro.groups[index]
        by_load = micro.by_load[group.size]
        del by_load[bisect_left(by_load, (load, index))]
        insort(by_load, (after, index))
        group.load = after
        group.rows = group.rows + self.rows[group.size][x]
        group.samples.append(x)

    def _fits(self, micro: _Microbatch, time: float, variant: _Variant, x: int) -> bool:
        return (
            self._opens(micro, x, time, variant.base) is not None
            or self._least_loaded(micro, x, time, variant.share) is not None
        )

    def _grow(self, micro: _Microbatch) -> bool:
        """Step 2, for the slowest of the groups for which enough ranks are left."""
        able = [
            group
            for group in micro.groups
            if group.size + 1 < len(self.sizes) and self._more(group) <= micro.free
        ]
        if not able:
            return False
        group = max(able, key=lambda group: group.load)
        load, rows = self._load(group.size + 1, group.samples)
        if load >= group.load or rows > self.sizes[group.size + 1].limit:
            return False
        by_load = micro.by_load[group.size]
        del by_load[bisect_left(by_load, (group.load, group.index))]
        micro.free -= self._more(group)
        group.size = group.size + 1
        group.load = load
        group.rows = rows
        insort(micro.by_load[group.size], (load, group.index))
        return True

    def _more(self, group: _Group) -> int:
        """Ranks that the next size of a group has more."""
        return self.sizes[group.size + 1].size - self.sizes[group.size].size

    def _load(self, size: int, samples: Sequence[int]) -> tuple[float, int]:
        """Seconds and padded tokens of a group."""
        load = self.sizes[size].fixed if samples else 0.0
        rows = 0
        for x in samples:
            load += self.cost[size][x]
            rows += self.rows[size][x]
        return load, rows
