"""The groups of dynamic context parallelism that a plan allows, with their costs."""

from __future__ import annotations

from pyrl_ext.plan.forecast.compute_time import Passes
from pyrl_ext.plan.forecast.flops import sample_rates
from pyrl_ext.plan.forecast.workload import scored_share
from pyrl_ext.plan.model.hardware import gpu_of
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.cp_problem import CostModel, CpGroups, ExchangeCost


def cp_groups(plan: Plan, cost: CostModel | None = None) -> CpGroups:
    """The groups that the data- and context-parallel ranks of `plan` may form.

    Args:
        cost: None: `costs_of` the plan.
    """
    parallel = plan.parallel
    return CpGroups(
        parallel.dp * parallel.cp,
        plan.batching.tokens_per_microbatch,
        cost=costs_of(plan) if cost is None else cost,
        min_cp_size=parallel.cp,
        max_cp_size=parallel.dynamic_cp,
        tp_size=parallel.tp,
        tile_rows=plan.tile_rows,
        pp_size=parallel.pp,
        vpp_size=parallel.vpp_size,
    )


def costs_of(plan: Plan) -> CostModel:
    """Cost of a microbatch on a group of context-parallel ranks: seconds as measured (`cp_cost`),
    or else on the plan's GPU as `step_time` prices an update; without a GPU, operations."""
    measured = plan.cp_cost
    if measured.token_seconds is not None:
        known = tuple(ExchangeCost(*each) for each in measured.exchanges)
        known = known or (ExchangeCost(1, 0, 0),)
        seconds = (measured.token_seconds, measured.square_seconds, measured.launch_seconds)
        return CostModel(*seconds, known)
    gpu = gpu_of(plan)
    pp = plan.parallel.pp
    if gpu is None:
        row, square = sample_rates(plan)
        share = 3 / plan.parallel.tp / pp
        return CostModel(share * row, share * square)
    scored = scored_share(plan)
    run = Passes(plan, gpu)

    def rates(cp: int) -> list[float]:
        """Seconds for a row, a pair, a scored row and a microbatch of an update, a stage."""
        return [each / pp for each in run.rates(cp, ["forward", "backward"])]

    row, pair, head, fixed = rates(1)
    alone = row + head * scored
    exchanges: list[ExchangeCost] = []
    ranks = plan.parallel.dp * plan.parallel.cp
    size = 2
    while size <= ranks:
        shared, _, shared_head, _ = rates(size)
        received = shared + shared_head * scored - alone / size
        exchanges.append(ExchangeCost(size, 0.0, max(0.0, received) * size / (size - 1)))
        size *= 2
    if exchanges:
        exchanges.append(exchanges[-1]._replace(up_to=ranks))
    return CostModel(alone + pair / 2, pair / 2, fixed, tuple(exchanges))
