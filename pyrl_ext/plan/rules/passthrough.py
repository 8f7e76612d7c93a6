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
def _table(name: str) -> dict[str, Any]:
    path = Path(__file__).parents[1] / name
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def megatron_fields() -> dict[str, Any]:
    """``plan/megatron_fields.yaml``: every field of megatron-core's config, by who sets it."""
    return _table("megatron_fields.yaml")


def engine_arguments() -> dict[str, Any]:
    """``plan/engine_arguments.yaml``: arguments of vLLM that are not passed on, by the reason."""
    return _table("engine_arguments.yaml")


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
            "them, so that no route would be replayed, silently. Use replay: on"
        )
    if key := groups["plan"].get(name):
        return f"expected it unset; the plan reads only {key}. Set that key instead"
    if name in groups["network"]:
        key = groups["network"][name]
        return (
            f"expected it {f'as {key} ' if key else ''}in model.config {in_config(plan)}; trainer "
            "and engine would run different networks. Set it there"
        )
    if reason := _reason(groups, name):
        return f"expected it left out; {reason}"
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


@rule("rollout.engine_options")
def engine_arguments_are_free(plan: Plan) -> Found:
    options = plan.rollout.engine_options if plan.rollout.engine == "vllm" else {}
    return _refused(plan, options, _engine_problem)


def _engine_problem(plan: Plan, name: str) -> str | None:
    groups = engine_arguments()
    if key := groups["plan"].get(name):
        return f"expected it unset; the trainer reads only {key}. Set that key instead"
    if reason := _reason(groups, name):
        return f"expected it left out; {reason}"
    if name in groups["without_routes"] and plan.replay.of_engine:
        return "expected it left out with replay on; vLLM returns no routes with it"
    return None


def _reason(groups: dict[str, Any], name: str) -> str | None:
    """Why `name` would break the trainer."""
    return next((each["reason"] for each in groups["breaking"] if name in each["fields"]), None)
