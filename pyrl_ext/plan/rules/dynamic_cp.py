"""Dynamic context parallelism: the sizes that a microbatch may take."""

from __future__ import annotations

from pyrl_ext.plan.model.cp_sizes import cp_sizes
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, choice, rule


@rule("parallel.dynamic_cp")
def the_largest_size_is_that_of_a_group(plan: Plan) -> Found:
    parallel, largest = plan.parallel, plan.parallel.dynamic_cp
    ranks = parallel.dp * parallel.cp
    _, *sizes = cp_sizes(ranks, parallel.cp)
    if largest and largest not in sizes:
        usable = f"Use {choice(sizes)}" if sizes else "Use null, or raise dp"
        return (
            f"{largest}, expected cp {parallel.cp} times a power of two, or dp {parallel.dp} * cp "
            f"{parallel.cp} = {ranks}, above cp; microbatches have groups of these sizes to choose "
            f"from, cp ranks at least. {usable}"
        )
