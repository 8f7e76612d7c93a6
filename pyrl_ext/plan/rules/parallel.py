"""Widths, heads and experts over ranks."""

from __future__ import annotations

import math

from pyrl_ext.plan.model.units import DTYPE_BYTES
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import (
    ROW_BYTES,
    Found,
    choice,
    divisors,
    in_config,
    indivisible,
    rule,
    unfit_for_heads,
)


@rule("parallel.tp")
def the_model_splits_over_tp(plan: Plan) -> Found:
    sizes = plan.sizes
    why = "each of them is split over tensor-parallel ranks"
    states = sizes.state_mixer.heads if sizes.state_mixer else {}
    wholes = {"num_attention_heads": sizes.num_attention_heads, **states} | sizes.tp_widths
    heads = unfit_for_heads(plan, plan.parallel.tp, "a key/value head is whole on a rank")
    return filter(None, (indivisible(plan.parallel.tp, wholes, why, in_config(plan)), heads))


@rule("parallel.tp")
def norms_over_all_heads_have_each_head_once(plan: Plan) -> Found:
    sizes = plan.sizes
    groups = sizes.query_groups
    if sizes.normalizes_all_heads and groups and plan.parallel.tp > groups:
        return (
            f"{plan.parallel.tp} above num_key_value_heads {groups} {in_config(plan)}, expected at "
            f"most {groups}; ranks that share a key head would count it more than once in the norm "
            f"over all of them. Use {choice(divisors(groups))}"
        )


@rule("parallel.tp")
def tensor_parallel_ranks_share_a_node(plan: Plan) -> Found:
    node = plan.hardware.gpus_per_node
    parallel = plan.parallel
    if plan.device == "cuda" and plan.world_size > node:
        why = "tensor-parallel ranks wait for each other in every layer, over a node's fast links"
        return indivisible(parallel.tp, {"hardware.gpus_per_node": node}, why)


@rule("parallel")
def nodes_are_whole(plan: Plan) -> Found:
    node = plan.hardware.gpus_per_node
    parallel = plan.parallel
    world = plan.world_size
    if plan.device == "cuda" and world > node and world % node:
        own = [grid for grid in plan.grids.values() if grid.first]
        more = "".join(f" + {len(grid.ranks)} of {grid.name}" for grid in own)
        return (
            f"dp {parallel.dp} * tp {parallel.tp} * pp {parallel.pp} * cp {parallel.cp}{more} = "
            f"{world} ranks, expected a multiple of hardware.gpus_per_node {node}; "
            "devices of the last node would stay idle, and groups straddle nodes. Change dp"
        )


@rule("parallel.ep")
def experts_split_over_ep(plan: Plan) -> Found:
    experts = {plan.sizes.key("num_experts"): plan.sizes.num_experts}
    why = "every rank holds the same number of experts"
    return indivisible(plan.parallel.ep, experts, why, in_config(plan))


@rule("parallel.ep")
def there_are_experts_to_spread(plan: Plan) -> Found:
    if plan.parallel.ep > 1 and not plan.sizes.num_experts:
        return (
            f"{plan.parallel.ep}, expected 1 for a model without experts {in_config(plan)}; "
            "megatron-core refuses it. Use dp, tp or cp"
        )


@rule("parallel.etp")
def expert_width_splits_over_etp(plan: Plan) -> Found:
    width = {"moe_intermediate_size": plan.sizes.moe_intermediate_size}
    why = "an expert's width is split over etp ranks (null: tp)"
    return indivisible(plan.parallel.etp_size, width, why, in_config(plan))


@rule("parallel.etp")
def rows_of_experts_suit_grouped_products(plan: Plan) -> Found:
    whole = plan.sizes.moe_intermediate_size
    etp = plan.parallel.etp_size
    unit = ROW_BYTES // DTYPE_BYTES[plan.model.dtype]
    if plan.model.backend == "local" and whole % etp == 0 and whole // etp % unit:
        return (
            f"{etp} leaves {whole // etp} of moe_intermediate_size {whole} to a rank "
            f"{in_config(plan)}, expected a multiple of {unit} in {plan.model.dtype}; torch's "
            f"grouped products take rows of whole {ROW_BYTES} bytes. Use a smaller etp, with ep"
        )


@rule("parallel.ep")
def experts_fit_the_world(plan: Plan) -> Found:
    parallel = plan.parallel
    stage = parallel.world_size // parallel.pp
    span = parallel.ep * parallel.etp_size
    if stage % span:
        step = span // math.gcd(span, parallel.tp * parallel.cp)
        dp = (parallel.dp // step + 1) * step  # the next one that would do
        own = plan.world_size - parallel.world_size  # of encoders
        ranks = parallel.world_size // parallel.dp * dp + own
        return (
            f"ep {parallel.ep} * etp {parallel.etp_size} = {span} does not divide the {stage} "
            f"{'rank' if stage == 1 else 'ranks'} of a pipeline stage (dp {parallel.dp} * tp "
            f"{parallel.tp} * cp {parallel.cp}), expected a divisor; experts are spread over the "
            f"ranks of one stage. Lower ep, or raise dp to {dp}; where parallel.dp is left out it "
            f"follows from the processes: start {ranks}, or plan for them with pyrl plan --ranks "
            f"{ranks}"
        )
