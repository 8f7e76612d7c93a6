"""Adapters: which linears have them, under which layouts, and how they reach the engine."""

from __future__ import annotations

import difflib
from pathlib import Path

from pyrl_ext.plan.model.lora import adapted, adapter_faults, names_of
from pyrl_ext.plan.model.units import DTYPE_BYTES
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import ROW_BYTES, Found, in_config, relative, rule

FILES = ("adapter_config.json", "adapter_model.safetensors")


def _adapts_experts(plan: Plan) -> bool:
    return plan.lora is not None and any(
        each.experts
        for kind in {*plan.sizes.layer_kinds}
        for each in adapted(plan.sizes, plan.lora, kind)
    )


@rule("lora.targets")
def targets_are_linears_of_the_family(plan: Plan) -> Found:
    if plan.lora is None or plan.lora.targets == "all":
        return
    known = names_of(plan.sizes)
    for name in plan.lora.targets:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            meant = f". Did you mean {close[0]}?" if close else ""
            yield (
                f"{name!r}, expected some of {', '.join(known)}; {plan.model.family} has no such "
                f"linear {in_config(plan)}{meant}"
            )


@rule("lora.targets")
def some_linear_has_an_adapter(plan: Plan) -> Found:
    lora = plan.lora
    if lora is None:
        return None
    if lora.targets != "all" and not {*lora.targets} & {*names_of(plan.sizes)}:
        return None if lora.targets else "an empty list, expected names of linears, or all"
    if not any(adapted(plan.sizes, lora, kind) for kind in {*plan.sizes.layer_kinds}):
        named = ", ".join(lora.targets)
        return (
            f"{named} with lora.experts none, expected a linear that is left; only routed experts "
            f"have them {in_config(plan)}, so nothing would be trained"
        )


@rule("lora.experts")
def adapters_of_experts_have_experts(plan: Plan) -> Found:
    lora = plan.lora
    if lora is None or _adapts_experts(plan):
        return
    given = {"expert_rank": lora.expert_rank is not None, "experts": lora.experts == "shared_outer"}
    for name in (name for name, is_set in given.items() if is_set):
        yield (
            f"lora.{name} {getattr(lora, name)} without adapters of routed experts, expected it "
            "left out; nothing would read it"
        )


@rule("lora.dropout")
def adapters_have_no_dropout(plan: Plan) -> Found:
    if plan.lora is not None and plan.lora.dropout:
        return (
            f"{plan.lora.dropout:g}, expected 0; the policy that is trained would not be the one "
            "that samples, so that every ratio of their probabilities would be wrong"
        )


@rule("lora.experts")
def adapters_of_experts_split_as_other_weights(plan: Plan) -> Found:
    lora = plan.lora
    tp = plan.parallel.tp
    etp = plan.parallel.etp_size
    if lora is not None and _adapts_experts(plan) and 1 < etp < tp:
        return (
            f"{lora.experts} with parallel.etp {etp} and tp {tp}, expected etp 1 "
            f"or {tp}; the gradients of what each rank holds whole would need groups that "
            "megatron-core does not have. Use etp 1, or experts: none"
        )


@rule("lora.targets")
def queries_keys_and_values_have_adapters_together(plan: Plan) -> Found:
    groups = plan.sizes.query_groups
    tp = plan.parallel.tp
    gated = plan.sizes.has_output_gate
    if plan.lora is None or plan.lora.targets == "all" or groups is None:
        return None
    if tp <= groups and not gated:
        return None
    fused = ("q_proj", "k_proj", "v_proj")
    named = [name for name in fused if name in plan.lora.targets]
    if 0 < len(named) < len(fused):
        if gated:
            return (
                f"{', '.join(named)} {in_config(plan)}, expected all of {', '.join(fused)} or "
                "none; rows of gates are among those of queries. Name all three"
            )
        return (
            f"{', '.join(named)} with parallel.tp {tp} above num_key_value_heads {groups} "
            f"{in_config(plan)}, expected all of {', '.join(fused)} or none; ranks that share a "
            "group hold unequal parts of them. Name all three, or lower tp"
        )


@rule("lora.expert_rank")
def ranks_of_experts_suit_grouped_products(plan: Plan) -> Found:
    if plan.lora is None or not _adapts_experts(plan):
        return None
    rank = plan.lora.rank_of(expert=True)
    unit = ROW_BYTES // DTYPE_BYTES[plan.model.dtype]
    if rank % unit:
        return (
            f"rank {rank} for routed experts in {plan.model.dtype}, expected a multiple of {unit}; "
            f"grouped products take rows of whole {ROW_BYTES} bytes. Use expert_rank: "
            f"{-(-rank // unit) * unit}"
        )


@rule("lora")
def adapters_suit_the_trainer(plan: Plan) -> Found:
    """Parts of the trainer that would train more than the adapters of a frozen base."""
    if plan.lora is None:
        return
    rate = plan.model.router_bias_update_rate
    if plan.model.backend == "te":
        yield (
            "set with model.backend te, expected local; adapters are not connected to "
            "transformer-engine's layers, nor to products in 8 bits"
        )
    if rate:
        yield (
            f"set with model.router_bias_update_rate {rate:g}, expected 0; the base is frozen, and "
            "an adapter cannot hold the routers' bias"
        )
    for name in plan.modules:
        yield (
            f"set with modules.{name}, expected no encoders; adapters with encoders were never "
            "tested. Leave one of them out"
        )


@rule("lora.publish")
def the_engine_applies_every_adapter(plan: Plan) -> Found:
    if plan.lora is None or plan.lora.publish is None:
        return
    if plan.lora_publish is None:
        yield (
            f"{plan.lora.publish} with engine {plan.rollout.engine}, expected it left out; the "
            "engine takes no weights"
        )
    elif plan.lora.publish == "adapter":
        for fault in adapter_faults(plan, plan.sizes):
            yield f"adapter, expected merge or null; {fault}. Use merge, or leave that target out"


@rule("lora.weights")
def adapters_in_files_are_of_layers_with_gates(plan: Plan) -> Found:
    if plan.lora is not None and plan.lora.weights is not None and plan.sizes.mlp_matrices == 2:
        return (
            f"set with model.family {plan.model.family}, expected null; PEFT's files are not read "
            "for layers without gates"
        )


@rule("lora.weights")
def the_adapter_to_start_from_exists(plan: Plan) -> Found:
    if plan.lora is None or plan.lora.weights is None:
        return None
    folder = Path(plan.resolve(plan.lora.weights))
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        is_there = f"holds no {missing[0]}" if folder.is_dir() else "is not a folder"
        return (
            f"{relative(str(folder))} {is_there}, expected a folder with {' and '.join(FILES)}, as "
            "the peft package writes it"
        )
