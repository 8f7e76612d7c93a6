"""The network: its sizes, files and precision."""

from __future__ import annotations

import os
from pathlib import Path

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, relative, rule


@rule("model.config")
def sizes_do_not_contradict(plan: Plan) -> Found:
    return [f"{relative(plan.config_path)}: {each}" for each in plan.shape.contradictions()]


@rule("model.router_bias_update_rate")
def routers_have_a_bias(plan: Plan) -> Found:
    rate = plan.model.router_bias_update_rate
    if rate and not plan.shape.has_router_bias:
        return f"{rate:g}, expected 0; routers of {plan.model.family} have no bias to move"


@rule("model.mtp")
def mtp_layers_exist(plan: Plan) -> Found:
    if plan.model.mtp and not plan.shape.num_nextn_predict_layers:
        return f"on, expected num_nextn_predict_layers above 0 {in_config(plan)}. Use mtp: off"


@rule("model.backend")
def te_needs_a_gpu(plan: Plan) -> Found:
    if plan.model.backend == "te" and plan.device == "cpu":
        return "te with device cpu, expected device cuda; its kernels run on GPUs only. Use local"


@rule("model.tokenizer")
def tokenizer_exists(plan: Plan) -> Found:
    return _folder_or_hub_id(plan, plan.model.tokenizer, "tokenizer.json")


@rule("model.weights")
def weights_exist(plan: Plan) -> Found:
    return _folder_or_hub_id(plan, plan.model.weights, "*.safetensors")


def _folder_or_hub_id(plan: Plan, name: str | None, content: str) -> Found:
    if name is None or plan.is_hub_id(name):
        return None
    folder = plan.resolve(name)
    is_folder = os.path.isdir(folder)
    if not is_folder or not any(Path(folder).glob(content)):
        missing = f"holds no {content}" if is_folder else "is no folder"
        return f"{relative(folder)} {missing}, expected a folder with {content} or a hub id"


@rule("model.tokenizer")
def text_needs_a_tokenizer(plan: Plan) -> Found:
    if plan.model.tokenizer is None and plan.rollout.engine != "recorded":
        return "null, expected a tokenizer; prompts of data.task and data.prompts are text"
