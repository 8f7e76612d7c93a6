"""Layers over pipeline stages."""

from __future__ import annotations

from pyrl_ext.plan.model.chunks import (
    a_split_that_fits,
    chunks_problem,
    counts_problem,
    is_split_by,
    layout_problem,
    split_keys,
)
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, choice, divisors, in_config, rule


@rule("parallel.pp")
def a_split_needs_stages(plan: Plan) -> Found:
    if plan.parallel.pp == 1 and (keys := ", ".join(split_keys(plan.parallel))):
        return f"1 with {keys}, expected pp above 1; there is nothing to split. Remove {keys}"


@rule("parallel.vpp")
def chunks_need_stages(plan: Plan) -> Found:
    if plan.parallel.vpp and plan.parallel.pp == 1:
        vpp = plan.parallel.vpp
        return f"{vpp} with pp 1, expected pp above 1; there is nothing to interleave. Use null"


@rule("parallel")
def one_way_to_split(plan: Plan) -> Found:
    keys = split_keys(plan.parallel)
    if len({*keys.values()}) > 1:
        return (
            f"{', '.join(keys)} together, expected a layout, or layers of the first and last "
            "stage, or what to account for; megatron-core splits in one of these ways"
        )


@rule("parallel.pp")
def layers_split_over_stages(plan: Plan) -> Found:
    parallel, layers = plan.parallel, plan.sizes.num_hidden_layers
    pp, vpp = parallel.pp, parallel.vpp_size
    counted = [key.split("_")[2] for key in split_keys(parallel)]
    slots = layers + len(counted)
    if is_split_by(parallel, "even") and slots % (pp * vpp):
        chunks = f"pp {pp} * vpp {vpp} = {pp * vpp}" if vpp > 1 else f"{pp}"
        total = f" + {' + '.join(counted)} = {slots}" if counted else ""
        other = "" if counted else f", or {a_split_that_fits(parallel, layers)}"
        return (
            f"{chunks} does not divide num_hidden_layers {layers}{total} {in_config(plan)}, "
            "expected a divisor; every stage holds the same number of layers. Use "
            f"{choice(divisors(slots))}{other}"
        )


@rule("parallel.pp")
def stage_counts_leave_equal_stages(plan: Plan) -> Found:
    if is_split_by(plan.parallel, "counts"):
        return counts_problem(plan.parallel, plan.sizes.num_hidden_layers)


@rule("parallel.vpp")
def stage_counts_split_over_chunks(plan: Plan) -> Found:
    if is_split_by(plan.parallel, "counts"):
        return chunks_problem(plan.parallel)


@rule("parallel.pipeline_model_parallel_layout")
def layout_places_the_model(plan: Plan) -> Found:
    if is_split_by(plan.parallel, "layout"):
        return layout_problem(plan.parallel, plan.sizes.num_hidden_layers, plan.num_mtp_layers)
