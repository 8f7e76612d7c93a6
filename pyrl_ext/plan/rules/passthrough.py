"""Options passed to megatron-core and vLLM unchanged: nothing that the plan, the HF config or the
trainer sets, and nothing that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, rule


@cache
def megatron_fields() -> dict[str, Any]:
    """``plan/megatron_fields.yaml``: every field of megatron-core's config, by who sets it."""
    path = Path(__file__).parents[1] / "megatron_fields.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def field_names() -> set[str]:
    """The names in `megatron_fields`."""
    groups = megatron_fields()
    names = {name for each in groups["breaking"] for name in each["fields"]}
    return names.union(*(groups[group] for group in groups if group != "breaking"))


def _refused(
    plan: Plan, options: dict[str, Any], problem_of: Callable[[Plan, str], str | None]
) -> Found:
    """(name, message) of the options that have a problem."""
    problems = {name: problem_of(plan, name) for name in options}
    return [(name, f"{show(options[name])}, {why}") for name, why in problems.items() if why]


@rule("model.megatron")
def megatron_fields_are_free(plan: Plan) -> Found:
    return _refused(plan, plan.model.megatron, _megatron_problem)


def _megatron_problem(plan: Plan, name: str) -> str | None:
    groups = megatron_fields()
    if name == "moe_enable_routing_replay":
        return (
            "expected it as replay; megatron-core would make its hooks and nobody would fill "
            "them, so that no route is replayed and nothing says so. Use replay: on"
        )
    if key := groups["plan"].get(name):
        return f"expected it unset; the plan reads only {key}. Set that key instead"
    if name in groups["network"]:
        key = groups["network"][name]
        return (
            f"expected it {f'as {key} ' if key else ''}in model.config {in_config(plan)}; trainer "
            "and engine would run different networks. Set it there"
        )
    for each in groups["breaking"]:
        if name in each["fields"]:
            return f"expected it left out; {each['reason']}"
    if name in groups["transformer_engine"] and plan.model.backend != "te":
        return (
            f"expected it left out with model.backend {plan.model.backend}; only "
            "transformer-engine's layers read it"
        )
    if name in groups["unread"]:
        return "expected it left out; no part of the trainer reads it"
    if name not in field_names():
        close = difflib.get_close_matches(name, sorted(field_names()), n=1, cutoff=0.6)
        meant = f". Did you mean {close[0]}?" if close else ""
        return f"expected a field of megatron-core 0.19.2's TransformerConfig{meant}"
    return None


_SAME_NAMES = ("gpu_memory_utilization", "logprobs_mode", "temperature", "top_p", "top_k")
# Argument of vLLM's engine, or of its sampling -> the key of the plan that sets it.
ENGINE_KEYS = {
    **dict.fromkeys(("model", "hf_config_path", "hf_overrides"), "model.config"),
    "tokenizer": "model.tokenizer",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tp",
    "enable_sleep_mode": "rollout.sleep",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "n": "batching.samples_per_prompt",
    "enable_return_routed_experts": "replay",
    "seed": "seed",
    **{name: f"rollout.{name}" for name in _SAME_NAMES},
}

_SAMPLING = "the trainer scores the distribution that temperature alone makes"
_COUNT = "an engine has rollout.tp GPUs, and there are as many engines as fit"
# Argument -> what of the trainer it would break.
ENGINE_BREAKING = {
    **dict.fromkeys(("generation_config", "override_generation_config", "min_p"), _SAMPLING),
    **dict.fromkeys(("logits_processors", "logit_bias", "repetition_penalty"), _SAMPLING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _SAMPLING),
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), _COUNT),
    "load_format": "the trainer hands over all weights, at the start and after each step",
}
# Arguments beside which vLLM refuses to return routes (its VllmConfig.__post_init__).
ENGINE_WITHOUT_ROUTES = {
    *("decode_context_parallel_size", "prefill_context_parallel_size"),
    *("kv_transfer_config", "kv_offloading_size"),
}


@rule("rollout.engine_options")
def engine_arguments_are_free(plan: Plan) -> Found:
    options = plan.rollout.engine_options if plan.rollout.engine == "vllm" else {}
    return _refused(plan, options, _engine_problem)


def _engine_problem(plan: Plan, name: str) -> str | None:
    if key := ENGINE_KEYS.get(name):
        return f"expected it unset; the trainer reads only {key}. Set that key instead"
    if reason := ENGINE_BREAKING.get(name):
        return f"expected it left out; {reason}"
    if name in ENGINE_WITHOUT_ROUTES and plan.replay.enabled:
        return "expected it left out with replay on; vLLM returns no routes beside it"
    return None
