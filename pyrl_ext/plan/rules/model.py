"""The network: its sizes, files and precision."""

from __future__ import annotations

import json
from pathlib import Path

from pyrl_ext.plan.language.paths import similar
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, in_config, relative, rule


@rule("model.config")
def sizes_do_not_contradict(plan: Plan) -> Found:
    return [f"{relative(plan.config_path)}: {each}" for each in plan.sizes.contradictions()]


@rule("model.router_bias_update_rate")
def routers_have_a_bias(plan: Plan) -> Found:
    rate = plan.model.router_bias_update_rate
    if rate and not plan.sizes.has_router_bias:
        return f"{rate:g}, expected 0; routers of {plan.model.family} have no bias to move"


@rule("model.recompute_modules")
def recomputed_modules_are_recomputed(plan: Plan) -> Found:
    names = plan.model.recompute_modules
    listed = f"[{', '.join(names)}]"
    if plan.model.recompute != "selective":
        if changed(plan.model, "recompute_modules"):
            yield (
                f"{listed} with model.recompute {plan.model.recompute}, expected it left out; "
                "selective alone reads it"
            )
        return
    if not names:
        yield "[], expected at least one module. Use model.recompute: none"
    if len(set(names)) < len(names):
        yield f"{listed}, expected each module once"
    if not plan.sizes.num_experts and ("moe_act" in names or "core_attn" not in names):
        yield f"{listed} with a model without routed experts, expected [core_attn]"
    if "moe_act" not in names:
        return
    if "moe" in names:
        yield f"{listed}, expected moe or moe_act; moe recomputes all of the experts"
    if plan.model.backend == "te":
        yield f"{listed} with model.backend te, expected it without moe_act; local alone has it"
    if plan.lora is not None:
        yield (
            f"{listed} with lora, expected it without moe_act; frozen experts keep nothing that it "
            "could save, and adapters read what it would drop"
        )


@rule("model.mtp")
def mtp_layers_exist(plan: Plan) -> Found:
    if plan.model.mtp and not plan.sizes.num_nextn_predict_layers:
        return f"on, expected num_nextn_predict_layers above 0 {in_config(plan)}. Use mtp: off"


@rule("model.tokenizer")
def tokenizer_exists(plan: Plan) -> Found:
    return _missing(_folder(plan, plan.model.tokenizer), "tokenizer.json")


# What a folder may hold instead of safetensors -> what that is, and what to do.
OTHER_WEIGHTS = {
    "*.distcp": ("a checkpoint of megatron-core", "Name its run folder as init_from"),
    "iter_*": ("a checkpoint of Megatron-LM", "Export it to safetensors with HF's names"),
    "*.gguf": ("quantized weights of llama.cpp", "Name the model that they were made from"),
    "pytorch_model*.bin": ("pickled weights, which may run code", "Save them as safetensors"),
}


@rule("model.weights")
def weights_exist(plan: Plan) -> Found:
    folder = _folder(plan, plan.model.weights)
    if folder and not any(folder.glob("*.safetensors")):
        for pattern, (what, fix) in OTHER_WEIGHTS.items():
            if first := min(folder.glob(pattern), default=None):
                return f"{relative(str(first))} is {what}, expected *.safetensors. {fix}"
    return _missing(folder, "*.safetensors")


@rule("model.weights")
def no_shard_is_missing(plan: Plan) -> Found:
    folder = _folder(plan, plan.model.weights)
    index = folder / "model.safetensors.index.json" if folder else None
    if index is None or not index.exists():
        return None
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        shards = {str(name) for name in named}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{relative(str(index))} is no index of weights, expected HF's JSON with weight_map"
    if missing := sorted(shard for shard in shards if not (index.parent / shard).is_file()):
        return (
            f"{relative(str(index))} names {missing[0]}, which is not there ({len(missing)} of "
            f"{len(shards)} files missing), expected all that it names. Fetch them again"
        )


def _folder(plan: Plan, name: str | None) -> Path | None:
    return None if name is None or plan.is_hub_id(name) else Path(plan.resolve(name))


def _missing(folder: Path | None, content: str) -> Found:
    if folder and not any(folder.glob(content)):
        path = relative(str(folder))
        rule = f"expected a folder with {content} or a hub id"
        if folder.is_dir():
            return f"{path} holds no {content}, {rule}"
        return f"{path} is not a folder, {rule}{similar(str(folder))}"


@rule("model.tokenizer")
def text_needs_a_tokenizer(plan: Plan) -> Found:
    if plan.model.tokenizer is None and plan.rollout.engine in ("hf", "vllm"):
        return (
            "null, expected the folder or the hub id of a tokenizer; prompts of data.task and "
            "data.prompts are text, and the model reads tokens"
        )
