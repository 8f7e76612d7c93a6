"""What a plan should say although nothing is wrong, and what the trainer cannot run yet."""

from __future__ import annotations

from pyrl_ext.plan.compiled import Plan

# The epsilon of transformers' norms inside multi-latent attention, whatever rms_norm_eps says.
MLA_NORM_EPS = 1e-6


def notes(plan: Plan) -> tuple[str, ...]:
    """Facts of `plan` that a reader may not expect."""
    found: list[str] = []
    model, shape = plan.model, plan.shape
    if shape.rms_norm_eps != MLA_NORM_EPS:
        found.append(
            f"rms_norm_eps is {shape.rms_norm_eps:g}; transformers computes the q_a and kv_a norms "
            f"with {MLA_NORM_EPS:g}, other engines with {shape.rms_norm_eps:g}: log-probs differ "
            "by about 1e-5"
        )
    if shape.num_nextn_predict_layers and not model.mtp:
        found.append(
            f"model.mtp is off: the {shape.num_nextn_predict_layers} multi-token-prediction layers "
            "of the checkpoint are neither loaded nor trained"
        )
    if model.router_bias_update_rate and plan.row_alignment > 1:
        found.append(
            f"model.router_bias_update_rate is {model.router_bias_update_rate:g} and sequences are "
            f"padded to a multiple of {plan.row_alignment}: megatron-core counts padding rows as "
            "load of the experts, so the bias moves a little differently in every layout"
        )
    if model.weights is None:
        found.append("model.weights is null: training starts from random weights")
    for key, name in (("tokenizer", model.tokenizer), ("weights", model.weights)):
        if name is not None and plan.is_hub_id(name):
            found.append(
                f"model.{key}: {name} is no folder beside the YAML, so it is taken as a hub id"
            )
    if plan.replay.enabled and plan.rollout.engine == "recorded":
        found.append(
            "replay is on: whether the recorded samples have routes is known when they are read"
        )
    if plan.replay.old != plan.replay.train:
        found.append(
            "replay.old and replay.train differ: the first update's ratio compares different routes"
        )
    if plan.data.prompts and plan.data.eval_prompts is None:
        found.append("data.eval_prompts is null: every eighth of data.prompts is held out instead")
    return tuple(found)


def unsupported(plan: Plan) -> tuple[str, ...]:
    """What `plan` names that the trainer refuses to start, each with its key."""
    found: list[str] = []
    if plan.rollout.engine == "vllm":
        found.append("rollout.engine: vllm is not connected yet. Use hf or recorded")
    if plan.model.mtp:
        found.append("model.mtp: multi-token-prediction layers are not trained yet. Use off")
    if plan.model.backend != "local":
        found.append(f"model.backend: {plan.model.backend} is not connected yet. Use local")
    for key, name in (("tokenizer", plan.model.tokenizer), ("weights", plan.model.weights)):
        if name is not None and plan.is_hub_id(name):
            found.append(
                f"model.{key}: {name} is a hub id, which is not fetched yet. Download it and name "
                "the folder"
            )
    return tuple(found)
