"""The groups of dynamic context parallelism that a plan allows, with their costs."""

from __future__ import annotations

from pyrl_ext.plan.forecast.cp_costs import costs_of
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.cp_problem import CostModel, CpGroups


def cp_groups(plan: Plan, cost: CostModel | None = None) -> CpGroups:
    """The groups that the data- and context-parallel ranks of `plan` may form.

    Args:
        cost: None: as `cp_cost` of the plan, or else as its forecast (`costs_of`).
    """
    parallel = plan.parallel
    return CpGroups(
        parallel.dp * parallel.cp,
        plan.batching.tokens_per_microbatch,
        cost=costs_of(plan).model if cost is None else cost,
        min_cp_size=parallel.cp,
        max_cp_size=parallel.dynamic_cp,
        tp_size=parallel.tp,
        tile_rows=plan.tile_rows,
        pp_size=parallel.pp,
        vpp_size=parallel.vpp_size,
    )
