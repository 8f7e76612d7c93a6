"""The best of all plans of few samples, by dynamic programming over sets of them.

A set is a number whose bit x stands for sample x. For every number of ranks and every set the least
time of its slowest group follows from the sets without one group; for every number of microbatches
and every set the least time of all follows from the sets without one microbatch. Groups of any
sizes that add up to at most the ranks can be placed, larger ones first, so places do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pyrl_ext.schedule.cp_problem import CpInstance, CpSize

MOST_STEPS = 1 << 20
"""A larger search is left to `dynamic_cp`."""

Groups = list[tuple[int, list[int]]]
"""Index into the sizes, and samples, of every group of a microbatch."""


def is_few(problem: CpInstance) -> bool:
    """True if all plans are looked at: 3^samples x ranks x sizes steps."""
    ranks = problem.num_ranks // problem.sizes[0].size
    samples = min(len(problem.lengths), 64)
    return 3**samples * ranks * len(problem.sizes) <= MOST_STEPS


def best_plan(
    problem: CpInstance, cost: Sequence[Sequence[float]], rows: Sequence[Sequence[int]]
) -> list[Groups]:
    """The microbatches of least time; of several such plans the one that is found first.

    Args:
        problem: gives ranks, sizes, launch and the multiple.
        cost, rows: [size][sample] seconds, without what a group takes anyway, and padded tokens.

    Returns:
        A number of microbatches that the multiple divides, or as many as there are samples.
    """
    groups = _Groups(problem, cost, rows)
    samples = len(problem.lengths)
    everything = (1 << samples) - 1
    times = [[math.inf] * (everything + 1) for _ in range(samples + 1)]
    first = [[0] * (everything + 1) for _ in range(samples + 1)]
    times[0][0] = 0.0
    for held in range(1, everything + 1):
        for part in _with_lowest(held):
            for count in range(1, samples + 1):
                time = groups.slowest[-1][part] + times[count - 1][held ^ part]
                if time < times[count][held]:
                    times[count][held], first[count][held] = time, part
    best = 0
    least = math.inf
    for count in range(1, samples + 1):
        if count % problem.multiple and count != samples:
            continue
        launched = -(-count // problem.multiple) * problem.multiple
        time = problem.launch * launched + times[count][everything]
        if best == 0 or time < least:
            best = count
            least = time
    plan = []
    held = everything
    for count in range(best, 0, -1):
        plan.append(groups.of(first[count][held]))
        held ^= first[count][held]
    return plan


class _Groups:
    """The best groups of every set of samples in one microbatch."""

    def __init__(
        self, problem: CpInstance, cost: Sequence[Sequence[float]], rows: Sequence[Sequence[int]]
    ) -> None:
        unit = problem.sizes[0].size
        self.widths = [size.size // unit for size in problem.sizes]
        sets = 1 << len(problem.lengths)
        ranks = problem.num_ranks // unit
        # [ranks][set]: the time of the slowest group, and the size and set of the group that holds
        # the first sample
        self.slowest = [[0.0] + [math.inf] * (sets - 1) for _ in range(ranks + 1)]
        self.chosen = [[(0, 0)] * sets for _ in range(ranks + 1)]
        seconds = [_seconds(*each) for each in zip(problem.sizes, cost, rows, strict=True)]
        for held in range(1, sets):
            for part in _with_lowest(held):
                for k, width in enumerate(self.widths):
                    alone = seconds[k][part]
                    for r in range(width, ranks + 1):
                        time = max(alone, self.slowest[r - width][held ^ part])
                        if time < self.slowest[r][held]:
                            self.slowest[r][held], self.chosen[r][held] = time, (k, part)

    def of(self, held: int) -> Groups:
        """The groups of a set on all ranks."""
        found = []
        ranks = len(self.slowest) - 1
        while held:
            k, part = self.chosen[ranks][held]
            found.append((k, [x for x in range(part.bit_length()) if part >> x & 1]))
            held = held ^ part
            ranks = ranks - self.widths[k]
        return found


def _seconds(size: CpSize, cost: Sequence[float], rows: Sequence[int]) -> list[float]:
    """Seconds of every set of samples as one group; infinite beyond its limit."""
    seconds = [size.fixed]
    held = [0]
    for x in range(len(cost)):  # the sets whose last sample is x
        seconds += [before + cost[x] for before in seconds]
        held += [before + rows[x] for before in held]
    return [s if n <= size.limit else math.inf for s, n in zip(seconds, held, strict=True)]


def _with_lowest(held: int) -> Iterator[int]:
    """Every part of a set that has its lowest element, the smallest number first."""
    lowest = held & -held
    rest = held ^ lowest
    part = 0
    while True:
        yield part | lowest
        part = (part - rest) & rest
        if part == 0:
            return
