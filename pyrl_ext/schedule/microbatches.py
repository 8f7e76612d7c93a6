"""Which samples run together, in which microbatch, on which ranks: the functions that decide it."""

from __future__ import annotations

from collections.abc import Sequence

from pyrl_ext.schedule.alignment import padded
from pyrl_ext.schedule.cp_problem import CostModel, CpGroups, CpInstance, CpSize
from pyrl_ext.schedule.native_search import search
from pyrl_ext.schedule.packing import pack_samples
from pyrl_ext.schedule.schedule import Group, Microbatch, Schedule

ROWS = CostModel(token_seconds=1.0, square_seconds=0.0)
"""A sample takes as long as it has rows."""


def plan_microbatches(
    seqlens: Sequence[int],
    dp_size: int,
    tokens_per_microbatch: int,
    align: int = 1,
    cp_size: int = 1,
    cost: CostModel = ROWS,
) -> Schedule:
    """Samples of every microbatch of every data-parallel rank, deterministic, so that all ranks
    finish early.

    Every group has ``cp_size`` ranks. There are as few microbatches as `pack_samples` finds; its
    plan and that of `plan_dynamic_cp` for groups of one size are compared, and the faster one wins.

    Args:
        seqlens: rows of each sample [tokens].
        dp_size: data-parallel ranks.
        tokens_per_microbatch: most padded rows of a microbatch on one context-parallel rank
            [tokens].
        align: every sample is padded to a multiple of this [tokens].
        cp_size: context-parallel ranks that share the rows of a microbatch.
        cost: seconds of a microbatch.

    Returns:
        A group may be empty, a microbatch only if there are fewer samples than microbatches.

    Raises:
        ValueError: a sample does not fit into a microbatch alone, or a size is not positive.
    """
    limit = tokens_per_microbatch * cp_size
    _check_sizes(seqlens, dp_size, limit, align)
    size = CpSize(cp_size, align, limit // align * align, *cost.rates(cp_size))
    lengths = tuple(map(int, seqlens))
    problem = CpInstance(lengths, dp_size * cp_size, (size,), cost.launch_seconds, multiple=1)
    searched = search(problem)
    few = _packed(problem, dp_size, searched.lower_bound)
    shorter = len(searched) <= len(few) and searched.makespan < few.makespan
    return searched if shorter else few


def _packed(problem: CpInstance, dp_size: int, lower_bound: float) -> Schedule:
    """The plan of `pack_samples` for groups of one size."""
    (size,) = problem.sizes
    rows = [padded(n, size.unit) for n in problem.lengths]
    work = [size.token * n + size.square * n * n for n in rows]
    microbatches: list[Microbatch] = []
    makespan = 0.0
    for bins in zip(*pack_samples(rows, dp_size, size.limit, work), strict=True):
        groups = [Group(rank * size.size, size.size, ids) for rank, ids in enumerate(bins)]
        microbatches.append(tuple(groups))
        slowest = max(sum(work[i] for i in ids) for ids in bins)
        makespan += problem.launch + size.fixed + slowest
    return Schedule(problem.num_ranks, tuple(microbatches), makespan, lower_bound)


def plan_dynamic_cp(seqlens: Sequence[int], groups: CpGroups) -> Schedule:
    """Samples and group sizes of every microbatch, deterministic, so that all ranks finish early.

    `pyrl_ext.schedule.dynamic_cp` documents the algorithm.

    Args:
        seqlens: rows of each sample [tokens].

    Returns:
        A microbatch has no sample at all only if there are fewer samples than microbatches.

    Raises:
        ValueError: there are no samples, or one is empty or longer than the largest group takes.
    """
    return search(groups.problem(seqlens))


def _check_sizes(seqlens: Sequence[int], dp_size: int, limit: int, align: int) -> None:
    sizes = {"dp_size": dp_size, "tokens_per_microbatch": limit, "align": align}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"plan_microbatches: {name} is {value}, expected at least 1")
    if not len(seqlens):
        raise ValueError("plan_microbatches: 0 samples, expected at least 1")
    for sample, n in enumerate(seqlens):
        rows = padded(n, align)
        if n < 1:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows, expected at least 1"
            )
        if rows > limit:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows ({rows} padded to a multiple "
                f"of {align}), expected at most tokens_per_microbatch x cp = {limit}. Raise "
                "batching.tokens_per_microbatch or shorten the responses"
            )
