"""Trajectories of several turns: what an environment needs, and what excludes it."""

from __future__ import annotations

import re

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, in_config, rule
from pyrl_ext.plan.schema.turns import ENVIRONMENTS

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@rule("turns")
def an_environment_reads_what_is_set(plan: Plan) -> Found:
    turns = plan.turns
    if turns.environment is not None:
        return
    for name in type(turns).model_fields:
        if changed(turns, name):
            value = show(getattr(turns, name))
            yield name, f"{value} without turns.environment, expected it left out"


@rule("turns.environment")
def the_environment_exists(plan: Plan) -> Found:
    name = plan.turns.environment
    if name is not None and name not in ENVIRONMENTS and not _CLASS.fullmatch(name):
        return f"{show(name)}, expected {', '.join(ENVIRONMENTS)}, or module:Class"


@rule("turns.max_tokens")
def a_trajectory_has_room(plan: Plan) -> Found:
    tokens = plan.turns.max_tokens
    most = plan.sizes.max_position_embeddings
    if plan.turns.environment is None:
        return None
    if tokens <= plan.data.max_prompt_tokens:
        return (
            f"{tokens}, expected more than data.max_prompt_tokens {plan.data.max_prompt_tokens}; "
            "a trajectory holds its prompt, its answers and its observations"
        )
    if tokens > most:
        return f"{tokens}, expected at most max_position_embeddings {most} {in_config(plan)}"


@rule("turns.merge")
def one_sample_is_merged(plan: Plan) -> Found:
    if plan.turns.form == "concatenated" and not plan.turns.merge:
        return "false with turns.form concatenated, expected stepwise; one sample holds all turns"


@rule("turns.environment")
def the_environment_gives_the_reward(plan: Plan) -> Found:
    data = plan.data
    for name in ("task", "reward"):
        if plan.turns.environment is not None and getattr(data, name) is not None:
            own = f"data.{name} {getattr(data, name)}"
            what = f"{plan.turns.environment} with {own}"
            yield f"{what}, expected only one of them; each brings rewards"


@rule("turns.environment")
def an_environment_has_one_source(plan: Plan) -> Found:
    if plan.turns.environment is not None and plan.data.sources:
        return (
            f"{plan.turns.environment} with data.sources, expected data.prompts; the environment "
            "would reward the prompts of all sources"
        )


@rule("turns.environment")
def whole_groups_wait_for_their_environments(plan: Plan) -> Found:
    if plan.turns.environment is not None and plan.rollout.oversample > 1:
        return (
            f"{plan.turns.environment} with rollout.oversample {plan.rollout.oversample:g}, "
            "expected 1; the groups that are kept would be those of the fastest environments"
        )


@rule("turns.environment")
def one_rank_talks_to_an_engine(plan: Plan) -> Found:
    rollout = plan.rollout
    if plan.turns.environment is None or rollout.engine == "recorded" or rollout.tp == 1:
        return None
    if plan.transport == "inprocess":
        return (
            f"{plan.turns.environment} with rollout.tp {rollout.tp} and rollout.transport "
            "inprocess, expected tp 1 or another transport; the ranks of an engine would get "
            "turns at different times"
        )
