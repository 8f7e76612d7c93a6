"""Compares how the same samples could be scheduled: fixed and dynamic context parallelism.

The file's samples are one minibatch. A stage takes as long as the mean stage; pipeline bubbles are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from pyrl_ext.plan.cp_groups import cp_groups
from pyrl_ext.plan.forecast.cp_costs import costs_of
from pyrl_ext.plan.forecast.scale import World
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.cp_problem import CpSize
from pyrl_ext.schedule.dynamic_cp import Placed, search
from pyrl_ext.schedule.packing import pack_samples

Microbatch = tuple[Placed, ...]


class Strategy(NamedTuple):
    """A schedule of all samples, with what it costs."""

    name: str
    about: str
    microbatches: tuple[Microbatch, ...]
    times: tuple[tuple[float, ...], ...]
    """The time of every group of every microbatch."""
    launch: float
    """The time of a microbatch without samples."""
    work: float
    """Time of all groups, times their ranks."""
    ranks: int
    rows: int
    padded: int
    cp_size: float
    """Ranks that share the sample of a row, in the mean over rows."""
    tokens: tuple[int, int]
    """Fewest and most padded rows of a rank, over all microbatches."""
    moved: int
    """Bytes that all ranks get from others which generated them."""
    away: int
    """Those of them that come from another host."""

    @property
    def makespan(self) -> float:
        """Time of the slowest group of every microbatch, added up."""
        return sum(max(each) + self.launch for each in self.times)

    @property
    def imbalance(self) -> float:
        """The makespan over the time of equally loaded ranks."""
        return self.makespan / (self.work / self.ranks + self.launch * len(self.times))

    @property
    def padding(self) -> float:
        """Share of the computed rows that are padding."""
        return 1 - self.rows / self.padded


class Comparison:
    """The strategies for samples of given lengths.

    Args:
        plan: gives ranks, limits and the model
        rows: of each sample
        owners: rank of the world that generated each sample

    Raises:
        ValueError: a sample is longer than the largest group takes
    """

    def __init__(self, plan: Plan, rows: Sequence[int], owners: Sequence[int]) -> None:
        self.plan = plan
        self.rows = tuple(rows)
        self.owners = tuple(owners)
        self.costs = costs_of(plan)
        groups = cp_groups(plan, self.costs.model)
        self.problem = groups.problem(self.rows)
        # a fixed size divides the ranks: that of the whole grid always does
        self._sizes = {each.size: each for each in replace(groups, max_cp_size=None).sizes}

    @cached_property
    def fixed(self) -> CpSize:
        """The smallest size of groups, all equal, that takes the longest sample."""
        longest = max(self.rows)
        ranks = self.problem.num_ranks
        return next(
            each
            for each in self._sizes.values()
            if ranks % each.size == 0 and _padded(longest, each.unit) <= each.limit
        )

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """First fit, balanced, and dynamic."""
        size = self.fixed.size
        dynamic = search(self.problem).microbatches
        sizes = sorted({g.cp_size for groups in dynamic for g in groups if g.samples})
        used = ", ".join(map(str, sizes))
        return (
            self._priced(f"cp {size}, first fit", "in the order of the file", self._first_fit()),
            self._priced(f"cp {size}, balanced", "longest first, emptiest bin", self._balanced()),
            self._priced("dynamic", f"each sample on {used} ranks", dynamic),
        )

    @property
    def best(self) -> Strategy:
        """The strategy that ends first."""
        return min(self.strategies, key=lambda each: each.makespan)

    def _first_fit(self) -> tuple[Microbatch, ...]:
        bins: list[list[int]] = []
        room: list[int] = []
        for sample, length in enumerate(self.rows):
            rows = _padded(length, self.fixed.unit)
            found = next((b for b, left in enumerate(room) if left >= rows), None)
            if found is None:
                found = len(bins)
                bins.append([])
                room.append(self.fixed.limit)
            bins[found].append(sample)
            room[found] -= rows
        groups = self.problem.num_ranks // self.fixed.size
        return self._dealt([bins[i : i + groups] for i in range(0, len(bins), groups)])

    def _balanced(self) -> tuple[Microbatch, ...]:
        loads = [_padded(length, self.fixed.unit) for length in self.rows]
        table = pack_samples(loads, self.problem.num_ranks // self.fixed.size, self.fixed.limit)
        return self._dealt(list(zip(*table, strict=True)))

    def _dealt(self, microbatches: Sequence[Sequence[Sequence[int]]]) -> tuple[Microbatch, ...]:
        """Bins as groups of the fixed size, and microbatches of padding as pipelines need them."""
        size = self.fixed.size
        ranks = self.problem.num_ranks
        missing = -len(microbatches) % self.problem.multiple
        return tuple(
            tuple(
                Placed(g * size, size, tuple(bins[g]) if g < len(bins) else ())
                for g in range(ranks // size)
            )
            for bins in [*microbatches, *[()] * missing]
        )

    def _priced(self, name: str, about: str, microbatches: tuple[Microbatch, ...]) -> Strategy:
        times = []
        work = 0.0
        shared = 0
        tokens = [0] * self.problem.num_ranks
        for groups in microbatches:
            times.append(tuple(self._seconds(group) for group in groups))
            for group, time in zip(groups, times[-1], strict=True):
                work += time * group.cp_size
                shared += group.cp_size * sum(self.rows[i] for i in group.samples)
                for rank in range(group.first, group.first + group.cp_size):
                    tokens[rank] += self._group_rows(group) // group.cp_size
        moved, away = self._moved(microbatches)
        return Strategy(
            name,
            about,
            microbatches,
            tuple(times),
            self.problem.launch,
            work,
            self.problem.num_ranks,
            sum(self.rows),
            sum(tokens),
            shared / sum(self.rows),
            (min(tokens), max(tokens)),
            moved,
            away,
        )

    def _group_rows(self, group: Placed) -> int:
        unit = self._sizes[group.cp_size].unit
        return sum(_padded(self.rows[i], unit) for i in group.samples)

    def _seconds(self, group: Placed) -> float:
        if not group.samples:
            return 0.0
        size = self._sizes[group.cp_size]
        rows = [_padded(self.rows[i], size.unit) for i in group.samples]
        return size.fixed + size.token * sum(rows) + size.square * sum(n * n for n in rows)

    def _moved(self, microbatches: tuple[Microbatch, ...]) -> tuple[int, int]:
        """Bytes of rows on ranks that did not generate them, and of those from other hosts."""
        plan = self.plan
        parallel = self.plan.parallel
        world = World(plan, ())
        rows = [world.row_bytes(stage) for stage in range(parallel.pp)]
        grid = parallel.dp * parallel.cp
        node = plan.hardware.gpus_per_node
        tp = parallel.tp
        moved = away = 0.0
        for group in (group for groups in microbatches for group in groups):
            for stage, each in enumerate(rows):
                first = (stage * grid + group.first) * tp
                ranks = range(first, first + group.cp_size * tp)
                hosts = [rank // node for rank in ranks]
                for sample in group.samples:
                    owner = self.owners[sample]
                    part = each * self.rows[sample] / group.cp_size
                    moved += part * (len(ranks) - (owner in ranks))
                    away += part * sum(host != owner // node for host in hosts)
        return round(moved), round(away)


def _padded(length: int, unit: int) -> int:
    return -(-length // unit) * unit
