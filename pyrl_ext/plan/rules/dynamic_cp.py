"""Dynamic context parallelism: the sizes that a microbatch may take."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, choice, rule
from pyrl_ext.plan.schema import Parallel


@rule("parallel.dynamic_cp")
def sizes_are_powers_of_two(plan: Plan) -> Found:
    sizes = {"dynamic_cp": plan.parallel.dynamic_cp, "cp": plan.parallel.cp}
    odd = [f"{name} {size}" for name, size in sizes.items() if size and size & (size - 1)]
    if sizes["dynamic_cp"] and odd:
        return (
            f"{' and '.join(odd)}, expected powers of two; a group of one size is two of the size "
            f"below. {_usable(plan.parallel)}"
        )


@rule("parallel.dynamic_cp")
def the_largest_size_is_larger(plan: Plan) -> Found:
    largest, cp = plan.parallel.dynamic_cp, plan.parallel.cp
    if largest and largest <= cp:
        return (
            f"{largest}, expected more than cp {cp}; cp is the smallest size, so that microbatches "
            f"would have no choice. {_usable(plan.parallel)}"
        )


@rule("parallel.dynamic_cp")
def groups_fill_the_replicas(plan: Plan) -> Found:
    parallel = plan.parallel
    ranks, largest = parallel.dp * parallel.cp, parallel.dynamic_cp
    if largest and ranks % largest:
        return (
            f"{largest} does not divide dp {parallel.dp} * cp {parallel.cp} = {ranks}, expected a "
            f"divisor; these ranks are cut into groups of it. {_usable(parallel)}"
        )


def _usable(parallel: Parallel) -> str:
    ranks, sizes = parallel.dp * parallel.cp, [2**i for i in range(1, 32)]
    fitting = [size for size in sizes if size > parallel.cp and ranks % size == 0]
    return f"Use {choice(fitting)}" if fitting else "Use null"
