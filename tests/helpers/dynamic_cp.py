"""Problems of dynamic context parallelism for tests: lengths, grids and limits of every kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from pyrl_ext.schedule import Schedule, plan_dynamic_cp
from pyrl_ext.schedule.alignment import alignment
from pyrl_ext.schedule.cp_problem import CostModel, CpGroups, CpInstance, CpSize, ExchangeCost

COST = CostModel(
    token_seconds=1e-6,
    square_seconds=1e-10,
    launch_seconds=2e-5,
    exchanges=(ExchangeCost(8, 1e-5, 1e-8), ExchangeCost(512, 2e-5, 5e-8)),
)


def planned(seqlens: Sequence[int], *sizes: int, **options: Any) -> Schedule:
    """`plan_dynamic_cp` on the groups of these sizes."""
    return plan_dynamic_cp(seqlens, CpGroups(*sizes, **options))


@st.composite
def problems(draw: st.DrawFn, most_samples: int = 40) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `planned` that it accepts, sizes of any kind among them."""
    least = draw(st.sampled_from([1, 1, 1, 2, 3]))
    ranks = least * draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 24]))
    sizes = [s for s in (least * 2**i for i in range(8)) if s <= ranks]
    most = draw(st.sampled_from([*sizes, ranks, None]))
    tp = draw(st.sampled_from([1, 2]))
    tile = draw(st.sampled_from([1, 8, 32]))
    limit = draw(st.integers(1, 12)) * alignment(tp, 2, 16)
    top = limit * (ranks if most is None else most) // alignment(tp, most or ranks, tile)
    top *= alignment(tp, most or ranks, tile)
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    lengths = st.one_of(st.integers(1, top), st.integers(1, min(top, limit)))
    seqlens = draw(st.lists(lengths, min_size=1, max_size=most_samples))
    options = dict(min_cp_size=least, max_cp_size=most, tp_size=tp, tile_rows=tile)
    return (seqlens, ranks, limit), dict(**options, pp_size=pp, vpp_size=vpp)


def least_makespan(problem: CpInstance) -> float:
    """Seconds of the best plan of all, by dynamic programming over sets of samples: for some ten.

    Any groups whose sizes add up to at most the ranks are counted, wherever they would begin. A
    microbatch without samples is one more only if every other one has a single sample.
    """
    sets = 1 << len(problem.lengths)
    ranks = problem.num_ranks
    group = [_group_seconds(problem, size) for size in problem.sizes]
    # microbatch[r][held]: the slowest group when `held` runs on r ranks at once
    microbatch = [[0.0] + [math.inf] * (sets - 1) for _ in range(ranks + 1)]
    samples = len(problem.lengths)
    multiple = problem.multiple
    # total[n][held]: the slowest groups of n microbatches that hold samples
    total = [[math.inf] * sets for _ in range(samples + 1)]
    total[0][0] = 0.0
    for held in range(1, sets):
        for first in _with_lowest(held):
            for r in range(1, ranks + 1):
                for size, seconds in zip(problem.sizes, group, strict=True):
                    if size.size <= r and seconds[first] < microbatch[r][held]:
                        rest = microbatch[r - size.size][held ^ first]
                        slower = max(seconds[first], rest)
                        microbatch[r][held] = min(microbatch[r][held], slower)
    for held in range(1, sets):
        for first in _with_lowest(held):
            for n in range(1, samples + 1):
                time = microbatch[ranks][first] + total[n - 1][held ^ first]
                total[n][held] = min(total[n][held], time)
    whole = [n for n in range(1, samples + 1) if n % multiple == 0 or n == samples]
    return min(problem.launch * (n + -n % multiple) + total[n][-1] for n in whole)


def _group_seconds(problem: CpInstance, size: CpSize) -> list[float]:
    """Seconds of each set of samples as one group; infinite beyond the token limit."""
    found = []
    for held in range(1 << len(problem.lengths)):
        rows = [
            -(-n // size.unit) * size.unit for i, n in enumerate(problem.lengths) if held >> i & 1
        ]
        seconds = size.fixed + size.token * sum(rows) + size.square * sum(n * n for n in rows)
        found.append(seconds if sum(rows) <= size.limit else math.inf)
    return found


def _with_lowest(held: int) -> Iterator[int]:
    """Every part of a set that has its lowest element."""
    lowest = held & -held
    part = held
    while part:
        if part & lowest:
            yield part
        part = (part - 1) & held
