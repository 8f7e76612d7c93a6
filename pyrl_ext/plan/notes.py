"""What a plan should say although nothing is wrong, and what the trainer cannot run yet."""

from __future__ import annotations

from pyrl_ext.plan.compiled import Plan


def notes(plan: Plan) -> tuple[str, ...]:
    """Facts of `plan` that a reader may not expect."""
    model, shape = plan.model, plan.shape
    found = list(shape.notes())
    if shape.num_nextn_predict_layers and not model.mtp:
        found.append(
            f"model.mtp is off: the {shape.num_nextn_predict_layers} multi-token-prediction layers "
            "of the checkpoint are neither loaded nor trained"
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
    found = [f"model.config: {reason}" for reason in plan.shape.unsupported()]
    if plan.shape.tie_word_embeddings and plan.parallel.pp > 1:
        found.append(
            "parallel.pp: tie_word_embeddings is true, and the first and last stage would each "
            "hold the embedding. Use pp: 1"
        )
    if plan.rollout.engine == "vllm":
        found.append("rollout.engine: vllm is not connected yet. Use hf or recorded")
    if plan.model.backend != "local":
        found.append(f"model.backend: {plan.model.backend} is not connected yet. Use local")
    found += [f"{key}: {value} is not built yet. Leave it out" for key, value in _not_built(plan)]
    for key, name in (("tokenizer", plan.model.tokenizer), ("weights", plan.model.weights)):
        if name is not None and plan.is_hub_id(name):
            found.append(
                f"model.{key}: {name} is a hub id, which is not fetched yet. Download it and name "
                "the folder"
            )
    return tuple(found)


def _not_built(plan: Plan) -> list[tuple[str, object]]:
    """(key, value) of every field that is set and that nothing in the trainer reads yet."""
    fields = {
        "model": ("offload_layers", "fp8", "megatron"),
        "parallel": ("dynamic_cp",),
        "rollout": ("tp", "gpus", "offload_trainer", "engine_options"),
        "optimizer": ("offload",),
    }
    unused = []
    for section, names in fields.items():
        given = getattr(plan, section)
        for name in names:
            default = type(given).model_fields[name].get_default(call_default_factory=True)
            if (value := getattr(given, name)) != default:
                unused.append((f"{section}.{name}", value))
    return unused
