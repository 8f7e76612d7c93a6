from collections.abc import Iterator

from pyrl_ext.ops._native import C
from pyrl_ext.plan.forecast import dynamic_cp, few_samples
from pyrl_ext.plan.forecast.cp_problem import Problem
from pyrl_ext.plan.forecast.dynamic_cp import Found, Placed


def search(problem: Problem) -> Found:
    plan = C.plan_dynamic_cp_cpu(
        C.CpProblem(
            lengths=problem.lengths,
            num_ranks=problem.num_ranks,
            sizes=[C.CpSize(*size) for size in problem.sizes],
            launch=problem.launch,
            multiple=problem.multiple,
            times=dynamic_cp.TIMES,
            slack=dynamic_cp.SLACK,
            weights=dynamic_cp.tried(dynamic_cp.WEIGHTS, len(problem.lengths)),
            bases=dynamic_cp.tried(dynamic_cp.BASES, len(problem.lengths)),
            most_steps=few_samples.MOST_STEPS,
        )
    )
    return Found(tuple(_microbatches(plan.numbers)), plan.makespan, plan.lower_bound)


def _microbatches(numbers: list[int]) -> Iterator[tuple[Placed, ...]]:
    """Groups from the numbers that `csrc/plan_dynamic_cp/api.hpp` describes."""
    at = 0
    while at < len(numbers):
        groups, at = [], at + 1
        for _ in range(numbers[at - 1]):
            first, size, count = numbers[at : at + 3]
            at += 3 + count
            groups.append(Placed(first, size, tuple(numbers[at - count : at])))
        yield tuple(groups)
