"""Weights that are not trained: patterns that name whole tensors, and what else has to suit."""

from __future__ import annotations

import difflib
from collections import defaultdict

from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.freeze import ROUTER_BIAS, every_layer, is_named, names_matched
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, rule


def _table(plan: Plan) -> list[Weight]:
    return plan.sizes.weights(plan.num_mtp_layers) if plan.model.freeze else []


@rule("model.freeze")
def patterns_match_weights(plan: Plan) -> Found:
    table = _table(plan)
    names = {name for row in table for name in row.hf_names}
    for pattern in plan.model.freeze:
        if pattern in names or names_matched(names, [pattern]):
            continue
        yield (
            f"{pattern!r} matches none of {len(names):,} weights {in_config(plan)}, expected their "
            "names in the Hugging Face checkpoint, with *, ? and [...]. "
            f"{_meant(plan, table, pattern)}"
        )


def _meant(plan: Plan, table: list[Weight], pattern: str) -> str:
    """A suggestion for a pattern without a match."""
    sizes = plan.sizes
    if sizes.tie_word_embeddings and is_named("lm_head.weight", [pattern]):
        return f"The head is {table[0].hf_names[0]} (tie_word_embeddings): freeze that, for both"
    if isinstance(sizes, VisionLanguage) and sizes.vision is not None:
        tower = [name for row in sizes.tower_weights() for name in row.hf_names]
        if any(is_named(name, [pattern]) for name in tower):
            return "Those of the vision tower are frozen by modules.vision.train: false"
    names = list(dict.fromkeys(every_layer(name) for row in table for name in row.hf_names))
    wider = [f"*{pattern}*"]
    close = [name for name in names if is_named(name, wider)]
    if not close:
        of_megatron = [row for row in table if is_named(row.megatron_name, [pattern])]
        close = [every_layer(name) for row in of_megatron for name in row.hf_names]
    if not close:
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    if not close:
        return f"Names are such as {', '.join(names[1:4])}"
    return f"Did you mean {' or '.join([*dict.fromkeys(close)][:3])}?"


@rule("model.freeze")
def patterns_match_whole_tensors(plan: Plan) -> Found:
    """A trained tensor may hold several checkpoint tensors; it is frozen as a whole or not."""
    found: dict[str, str] = {}
    table = _table(plan)
    matched = names_matched((name for row in table for name in row.hf_names), plan.model.freeze)
    for row in table:
        given = [name for name in row.hf_names if name in matched]
        others = [every_layer(name) for name in row.hf_names if name not in given]
        if given and others:
            named = [every_layer(name) for name in given]
            found[" ".join(named)] = (
                f"{' and '.join(named)} without {' and '.join(others)}, expected all of them or "
                "none; they are one tensor in training. Add the others, or leave these out"
            )
    return found.values()


@rule("model.freeze")
def patterns_match_all_experts_of_a_layer(plan: Plan) -> Found:
    layers: dict[str, list[Weight]] = defaultdict(list)
    for row in _table(plan):
        if row.expert is not None:
            experts, _, linear = row.megatron_name.rpartition(f".{row.expert}.")
            layers[f"{experts} {linear}"].append(row)
    found: dict[str, str] = {}
    for rows in layers.values():
        frozen = [row for row in rows if row.megatron_name in plan.frozen]
        if 0 < len(frozen) < len(rows):
            name = " and ".join(every_layer(part) for part in rows[0].hf_names)
            found[name] = (
                f"{len(frozen)} of the {len(rows)} experts of a layer ({frozen[0].hf_names[0]}), "
                f"expected all or none; they are one tensor in training. Use {name}, where the "
                "first * may be a layer's number"
            )
    return found.values()


@rule("model.freeze")
def biases_are_frozen_with_their_weights(plan: Plan) -> Found:
    rows = {row.megatron_name: row for row in _table(plan)}
    found: dict[str, str] = {}
    for name in plan.frozen:
        bias = f"{name.removesuffix('.weight')}.bias"
        if name.endswith(".weight") and bias in rows and bias not in plan.frozen:
            weights = ", ".join(map(every_layer, rows[name].hf_names))
            biases = ", ".join(map(every_layer, rows[bias].hf_names))
            found[weights] = (
                f"{weights} without {biases}, expected both or the bias alone; megatron-core "
                "computes no gradient for the bias of a frozen weight. Add the bias"
            )
    return found.values()


@rule("model.freeze")
def some_weight_is_trained(plan: Plan) -> Found:
    trained = {
        row.megatron_name for row in _table(plan) if not row.megatron_name.endswith(ROUTER_BIAS)
    }
    if trained and trained <= plan.frozen:
        return (
            f"the patterns match all {len(trained):,} trained tensors {in_config(plan)}, expected "
            "some that are left. Leave a pattern out"
        )


@rule("model.freeze")
def frozen_routers_keep_their_bias(plan: Plan) -> Found:
    rate = plan.model.router_bias_update_rate
    if rate and any(".router." in name for name in plan.frozen):
        return (
            f"routers with model.router_bias_update_rate {rate:g}, expected 0; the bias would "
            "still move, and a frozen router choose other experts. Set the rate to 0, or leave "
            "the routers out"
        )


@rule("model.freeze")
def frozen_weights_suit_the_trainer(plan: Plan) -> Found:
    if not plan.model.freeze:
        return
    if plan.lora is not None:
        yield "set with lora, expected an empty list; adapters freeze all weights of the base"
    if plan.model.backend == "te":
        yield (
            "set with model.backend te, expected local; transformer-engine's layers were never "
            "run with frozen weights"
        )
    for name in plan.modules:
        yield (
            f"set with modules.{name}, expected no encoders; frozen weights of the language model "
            "were never tested with them. Leave one of them out"
        )
