"""Encoders next to the language model: their names, ranks and microbatches."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pyrl_ext.plan.model.chunks import spell_out
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, indivisible, rule
from pyrl_ext.plan.schema.layout import ModuleParallel


@rule("modules")
def the_family_has_the_modules(plan: Plan) -> Found:
    known = {"vision"} if plan.sizes.vision else set()
    for name in plan.modules.keys() - known:
        rule = f"expected {' or '.join(known) or 'none'}"
        yield name, f"not a module of {plan.model.family} {in_config(plan)}, {rule}"


@rule("modules")
def encoders_suit_their_ranks(plan: Plan) -> Found:
    tower = plan.sizes.vision
    for name, module in plan.modules.items() if tower else ():
        tp = module.parallel.tp
        pp = module.parallel.pp
        assert tower is not None  # or there is nothing to go through
        if pp > tower.num_hidden_layers:
            rule = f"expected at most its {tower.num_hidden_layers} layers {in_config(plan)}"
            yield f"{name}.parallel.pp", f"{pp}, {rule}; a stage would have none"
        wholes = {key: getattr(tower, key) for key in ("num_attention_heads", "intermediate_size")}
        why = "each of them is split over tensor-parallel ranks"
        if problem := indivisible(tp, wholes, why, in_config(plan)):
            yield f"{name}.parallel.tp", problem
        first = plan.grids[name].first
        node = plan.hardware.gpus_per_node
        if plan.device == "cuda" and plan.world_size > node and (node % tp or first % tp):
            rule = (
                f"expected a divisor of hardware.gpus_per_node {node} and of its first rank {first}"
            )
            yield f"{name}.parallel.tp", f"{tp}, {rule}; tensor-parallel ranks share a node"
        limit = module.patches_per_microbatch
        most = largest_image(plan) or 0
        if limit < most:
            rule = f"expected at least {most}, the patches of the largest image that the processor"
            yield f"{name}.patches_per_microbatch", f"{limit}, {rule} makes; images are not split"


@rule("modules")
def shared_ranks_are_arranged_by_the_language_model(plan: Plan) -> Found:
    parallel = plan.parallel
    given = ModuleParallel()
    for name, module in plan.modules.items():
        if module.ranks == "shared" and module.parallel != given:
            held = ", ".join(f"{axis} {size}" for axis, size in module.parallel if size > 1)
            dp = plan.grids[name].parallel.dp
            why = f"dp {parallel.dp} * cp {parallel.cp} * tp {parallel.tp}"
            words = (
                f"{held} with ranks shared, expected none: a replica on each rank of the language "
                f"model's first stage is dp {dp} ({why}). Leave it out, or use ranks: own"
            )
            yield f"{name}.parallel", words


@rule("parallel.pipeline_model_parallel_layout")
def mtp_layers_read_a_shared_encoder_from_another_rank(plan: Plan) -> Found:
    shared = [name for name, module in plan.modules.items() if module.ranks == "shared"]
    stages = spell_out(plan.parallel.pipeline_model_parallel_layout or "").split("|")
    if shared and plan.parallel.pp > 1 and "m" in "".join(stages[:: plan.parallel.pp]):
        return (
            f"m in a later chunk of the first stage's ranks, which {shared[0]} shares, expected it "
            "on another stage; rows of images reach MTP layers from another rank only"
        )


@rule("parallel")
def features_are_added_in_the_first_chunk(plan: Plan) -> Found:
    features = len(plan.sizes.vision.deepstack) if plan.sizes.vision else 0
    if features and (layers := layers_of_first_chunk(plan)) < features:
        return (
            f"{layers} layers in the first chunk, expected at least {features}; features of as "
            "many layers of the tower are added behind them. Lower pp or vpp"
        )


def largest_image(plan: Plan) -> int | None:
    """Patches of the largest image that the model's processor makes.

    None if `model.tokenizer` is not a local folder, or its preprocessor_config.json states none.
    """
    folder = plan.tokenizer_path
    tower = plan.sizes.vision
    if folder is None or tower is None:
        return None
    try:
        read = json.loads(Path(folder, "preprocessor_config.json").read_text(encoding="utf-8"))
        pixels = read.get("max_pixels") or read["size"]["longest_edge"]
        return int(pixels) // tower.patch_size**2
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def layers_of_first_chunk(plan: Plan) -> float:
    """Decoder layers next to the embedding; infinity if none are placed (another rule)."""
    try:
        return len(plan.stages[0][0].layers)
    except ValueError:
        return math.inf
