"""Estimated cost of a microbatch on a group of context-parallel ranks."""

from __future__ import annotations

from typing import NamedTuple

from pyrl_ext.plan.forecast.compute_time import Passes
from pyrl_ext.plan.forecast.flops import model_flops
from pyrl_ext.plan.forecast.hardware import gpu_of
from pyrl_ext.plan.forecast.workload import step_samples
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.cp_problem import CostModel, Exchange


class Costs(NamedTuple):
    """The price of a microbatch, and where it comes from."""

    model: CostModel
    unit: str
    """s or FLOP."""
    why: str


def costs_of(plan: Plan) -> Costs:
    """Seconds as `cp_cost` has them, or else on the plan's GPU, as `step_time` prices an update;
    without a GPU, operations."""
    measured = plan.cp_cost
    if measured.token_seconds is not None:
        exchanges = tuple(Exchange(*each) for each in measured.exchanges) or (Exchange(1, 0, 0),)
        seconds = measured.token_seconds, measured.square_seconds, measured.launch_seconds
        model = CostModel(*seconds, exchanges)
        why = "forward and backward passes as measured"
        return Costs(model, "s", f"{why}, cp_cost")
    gpu = gpu_of(plan)
    samples = step_samples(plan)
    scored = sum(s.response for s in samples) / sum(s.rows for s in samples)
    tp = plan.parallel.tp
    pp = plan.parallel.pp
    if gpu is None:
        each = model_flops(plan.sizes, plan.num_mtp_layers)
        pair = 3 * each.attention / tp / pp
        row = 3 * (each.projections + each.experts + each.scan + each.head * scored) / tp / pp
        why = "operations of the slowest rank: hardware.gpu names no GPU; communication is free"
        return Costs(CostModel(row + pair / 2, pair / 2), "FLOP", why)
    run = Passes(plan, gpu)
    chunks = [chunk for stage in plan.stages for chunk in stage]

    def rates(cp: int) -> list[float]:
        found = [run.rates(c, cp, work) for c in chunks for work in ("forward", "backward")]
        return [sum(each) / pp for each in zip(*found, strict=True)]

    fixed, row, pair, head = rates(1)
    alone = row + head * scored
    exchanges = []
    size = 2
    while size <= plan.parallel.dp * plan.parallel.cp:
        _, shared, _, shared_head = rates(size)
        received = shared + shared_head * scored - alone / size
        exchanges.append(Exchange(size, 0.0, max(0.0, received) * size / (size - 1)))
        size *= 2
    if exchanges:
        exchanges.append(exchanges[-1]._replace(up_to=plan.parallel.dp * plan.parallel.cp))
    model = CostModel(alone + pair / 2, pair / 2, fixed, tuple(exchanges))
    return Costs(model, "s", f"forward and backward passes on {plan.hardware.gpu}, as in the plan")
