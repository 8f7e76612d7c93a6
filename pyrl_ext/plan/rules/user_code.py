"""Functions and classes of the user: they are there, as far as reading their files tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyrl_ext.plan.named_rewards import named_reward_problem, reward_function
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule
from pyrl_ext.plan.schema.turns import VERIFIERS
from pyrl_ext.plan.user_code import function_problem

_REWARD_TAKES = ("prompt", "text", "tokens")


@rule("data")
def the_reward_is_there(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        if message := _reward_problem(plan, keys.reward):
            yield f"{name}reward", message


@rule("evaluate.sets")
def the_rewards_of_sets_are_there(plan: Plan) -> Found:
    for name, chosen in plan.evaluate.sets.items():
        if message := _reward_problem(plan, chosen.reward):
            yield f"{name}.reward", message


@rule("objective.loss")
def the_loss_is_there(plan: Plan) -> Found:
    return _problem(plan, plan.objective.loss)


@rule("objective.advantage")
def the_advantage_is_there(plan: Plan) -> Found:
    return _problem(plan, plan.objective.advantage)


@rule("turns.environment")
def the_class_of_the_environment_is_there(plan: Plan) -> Found:
    return _environment_problem(plan, plan.turns.environment)


@rule("data.sources")
def the_classes_of_environments_of_sources_are_there(plan: Plan) -> Found:
    for source, keys in plan.data.sources.items():
        if message := _environment_problem(plan, keys.environment):
            yield f"{source}.environment", message
        for key, message in _option_problems(plan, keys.environment, keys.environment_options):
            yield f"{source}.environment_options.{key}", message


def _environment_problem(plan: Plan, name: str | None) -> str | None:
    """Why there is no class of an environment; one of verifiers is no class."""
    is_taskset = name is not None and name.startswith(VERIFIERS)
    return None if is_taskset else _problem(plan, name)


@rule("turns")
def the_function_of_the_agent_is_there(plan: Plan) -> Found:
    takes_of: dict[str, tuple[str, ...]] = {
        "agent": ("client", "prompt"),
        "reward": ("prompt", "calls"),
    }
    if plan.turns.options:
        takes_of["agent"] = ()  # they are arguments as well
    for name, takes in takes_of.items():
        function = getattr(plan.turns, name)
        if function is None or not all(function.partition(":")):
            continue
        if problem := function_problem(function, plan.resolve("."), takes):
            yield name, problem


@rule("turns.options")
def what_built_in_environments_call_is_there(plan: Plan) -> Found:
    yield from _option_problems(plan, plan.turns.environment, plan.turns.options)


def _option_problems(
    plan: Plan, environment: str | None, options: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """(option, message) of what an option names for a built-in environment, and is not there."""
    if environment not in ("messages", "tools"):
        return
    for key in ("environment", "reward", "tools"):
        for name in _names(options.get(key)):
            if message := _problem(plan, name):
                yield key, message


def _names(value: Any) -> Iterator[str]:
    """The texts that an option of an environment holds."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str):
            yield each


def _reward_problem(plan: Plan, name: str | None) -> str | None:
    if name is None:
        return None
    if problem := named_reward_problem(name):
        return problem
    return function_problem(reward_function(name), plan.resolve("."), _REWARD_TAKES)


def _problem(plan: Plan, name: str | None) -> str | None:
    """Why the user's function called `name` cannot be imported; None: it can, or is built in."""
    if name is None or not all(name.partition(":")):
        return None
    return function_problem(name, plan.resolve("."))
