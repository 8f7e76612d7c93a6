"""The search of `schedule/dynamic_cp.py` in C++ where the extension is built.

The Python search is the reference: both find the same plan, number for number. For 512 samples of
log-normal lengths on 64 ranks C++ takes 5 ms and Python 400 to 600 ms, so a run needs the former.
"""

from __future__ import annotations

from itertools import islice

from pyrl_ext.ops._native import C
from pyrl_ext.schedule import dynamic_cp, few_samples
from pyrl_ext.schedule.cp_problem import CpInstance
from pyrl_ext.schedule.schedule import Group, Microbatch, Schedule


def search(problem: CpInstance) -> Schedule:
    """The plan of `dynamic_cp.search`."""
    return dynamic_cp.search(problem) if C is None else search_native(problem)


def search_native(problem: CpInstance) -> Schedule:
    """The plan of `dynamic_cp.search`, from the extension."""
    samples = len(problem.lengths)
    plan = C.plan_dynamic_cp_cpu(
        C.CpProblem(
            lengths=problem.lengths,
            num_ranks=problem.num_ranks,
            sizes=[C.CpSize(*size) for size in problem.sizes],
            launch=problem.launch,
            multiple=problem.multiple,
            times=dynamic_cp.TIMES,
            slack=dynamic_cp.SLACK,
            weights=dynamic_cp.tried(dynamic_cp.WEIGHTS, samples),
            bases=dynamic_cp.tried(dynamic_cp.BASES, samples),
            most_steps=few_samples.MOST_STEPS,
        )
    )
    found = _microbatches(plan.numbers)
    return Schedule(problem.num_ranks, found, plan.makespan, plan.lower_bound)


def _microbatches(numbers: list[int]) -> tuple[Microbatch, ...]:
    """Groups from the numbers that `csrc/plan_dynamic_cp/api.hpp` describes."""
    stream = iter(numbers)
    microbatches: list[Microbatch] = []
    for num_groups in stream:
        groups: list[Group] = []
        for _ in range(num_groups):
            first = next(stream)
            cp_size = next(stream)
            num_samples = next(stream)
            groups.append(Group(first, cp_size, tuple(islice(stream, num_samples))))
        microbatches.append(tuple(groups))
    return tuple(microbatches)
