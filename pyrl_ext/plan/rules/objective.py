"""The objective: parts that contradict each other, or that nothing would read."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, rule
from pyrl_ext.plan.schema.objective import ADVANTAGES, LOSSES

# key -> the losses that read it
_READ_BY = {
    "dual_clip": ("ppo",),
    "sapo_tau": ("sapo",),
    "ratio": ("ppo", "cispo", "sapo"),
    "anchor": ("ppo", "cispo", "sapo", "gmpo", "dppo"),
}


@rule("objective")
def names_are_known(plan: Plan) -> Found:
    for key, known in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        if ":" not in (name := getattr(plan.objective, key)) and name not in known:
            yield key, f"{name}, expected {', '.join(known)}, or module:function"


@rule("objective")
def parts_are_read(plan: Plan) -> Found:
    objective = plan.objective
    for key, losses in _READ_BY.items():
        if changed(objective, key) and objective.loss in LOSSES and objective.loss not in losses:
            value = getattr(objective, key)
            others = ", ".join(losses)
            rule = f"expected it left out; only {others} reads it"
            yield key, f"{value} with loss {objective.loss}, {rule}"
    needs = {
        "tis_floor": ("tis_cap", objective.tis_cap is not None),
        "reduction_constant": ("reduction: sequence_sum", objective.reduction == "sequence_sum"),
        "leave_one_out": ("advantage: grpo", objective.advantage == "grpo"),
        "dynamic_sampling_shortage": ("dynamic_sampling", objective.dynamic_sampling > 0),
        "reference_refresh": ("kl_coef", objective.kl_coef > 0),
    }
    for key, (reader, given) in needs.items():
        if changed(objective, key) and not given:
            value = getattr(objective, key)
            yield key, f"{value} without {reader}, expected it left out; nothing else reads it"


@rule("objective.reference_refresh")
def the_reference_has_weights_of_its_own(plan: Plan) -> Found:
    if plan.objective.reference_refresh and plan.lora is not None:
        return (
            f"{plan.objective.reference_refresh} with lora, expected 0; the reference is the base "
            "without adapters, which no step changes. To start again from what is trained, export "
            "the run and name the folder as model.weights of a new one"
        )


@rule("objective")
def bounds_are_in_order(plan: Plan) -> Found:
    objective = plan.objective
    bounds = {key: getattr(objective, key) for key in ("mask_ratio", "sequence_bounds")}
    if objective.tis_floor is not None and objective.tis_cap is not None:
        bounds["tis_floor"] = objective.tis_floor, objective.tis_cap
    for key, given in bounds.items():
        if given is not None and not given[0] < given[1]:
            yield key, f"{given[0]:g} with upper bound {given[1]:g}, expected less than that"


@rule("objective.anchor")
def the_engine_is_corrected_once(plan: Plan) -> Found:
    objective = plan.objective
    if objective.anchor == "rollout" and objective.tis_cap is not None:
        return (
            f"rollout with tis_cap {objective.tis_cap:g}, expected only one of them; the ratio to "
            "the engine's log-probs already contains this weight"
        )


@rule("objective.kl_weight")
def one_name_for_one_gradient(plan: Plan) -> Found:
    if plan.objective.kl_weight == "detached" and plan.objective.kl_gradient == "reverse":
        return "detached with kl_gradient reverse, expected ratio or none; there it is the same"


@rule("objective.dynamic_sampling")
def groups_to_replace_are_known(plan: Plan) -> Found:
    if not (rounds := plan.objective.dynamic_sampling):
        return
    if plan.rollout.oversample > 1:
        yield (
            f"{rounds} with rollout.oversample {plan.rollout.oversample:g}, expected only one "
            "of them; both order and speed of groups would decide which are kept"
        )
    if plan.batching.samples_per_prompt == 1:
        yield (
            f"{rounds} with batching.samples_per_prompt 1, expected 0; all rewards of a group of "
            "one are equal"
        )
    if plan.objective.advantage == "reinforce_pp":
        yield (
            f"{rounds} with advantage reinforce_pp, expected 0; its baseline is that of the batch, "
            "so groups with equal rewards do train"
        )


@rule("turns.merge")
def ratios_of_sequences_have_whole_samples(plan: Plan) -> Found:
    objective = plan.objective
    if plan.turns.kind is None or plan.turns.merges:
        return
    for part, by_sequence in (
        (f"ratio {objective.ratio}", objective.ratio != "token"),
        ("loss gmpo", objective.loss == "gmpo"),
        (f"opsm {objective.opsm}", objective.opsm is not None),
    ):
        if by_sequence:
            why = "what it calls a sequence would be one turn"
            yield f"false with objective.{part}, expected true; {why}"
