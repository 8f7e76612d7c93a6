"""Dynamic context parallelism: the sizes that a microbatch may take, and their measured costs."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, choice, rule
from pyrl_ext.schedule.cp_sizes import cp_sizes


@rule("parallel.dynamic_cp")
def the_largest_size_is_that_of_a_group(plan: Plan) -> Found:
    parallel = plan.parallel
    largest = plan.parallel.dynamic_cp
    ranks = parallel.dp * parallel.cp
    _, *sizes = cp_sizes(ranks, parallel.cp)
    if largest and largest not in sizes:
        usable = f"Use {choice(sizes)}" if sizes else "Use null, or raise dp"
        return (
            f"{largest}, expected cp {parallel.cp} times a power of two, or dp {parallel.dp} * cp "
            f"{parallel.cp} = {ranks}, above cp; microbatches have groups of these sizes to choose "
            f"from, cp ranks at least. {usable}"
        )


AGAIN = "Copy what `python -m benchmarks.run dynamic_cp --calibrate CONFIG` prints"


@rule("cp_cost")
def measured_costs_are_complete(plan: Plan) -> Found:
    names = [name for name in type(plan.cp_cost).model_fields if changed(plan.cp_cost, name)]
    if names and plan.cp_cost.token_seconds is None:
        return (
            f"{', '.join(names)} without token_seconds, expected all or none; costs are measured "
            f"or estimated as a whole. {AGAIN}"
        )


@rule("cp_cost.exchanges")
def exchanges_reach_the_largest_group(plan: Plan) -> Found:
    sizes = [each[0] for each in plan.cp_cost.exchanges]
    most = plan.parallel.dynamic_cp or 1
    if sizes != sorted({*sizes}):
        return f"groups of {sizes} ranks, expected increasing sizes"
    if plan.cp_cost.token_seconds is not None and most > max(sizes, default=1):
        return (
            f"groups of up to {max(sizes, default=1)} ranks, expected parallel.dynamic_cp {most}; "
            f"a group that is not measured has no price. {AGAIN}, or lower parallel.dynamic_cp"
        )
