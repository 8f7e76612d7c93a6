"""Trajectories of several turns: what an environment needs, and what excludes it."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, in_config, rule
from pyrl_ext.plan.schema.turns import BY_SOURCE, ENVIRONMENTS, VERIFIERS
from pyrl_ext.plan.tasksets import taskset_problem

INSTALL = "pip install 'pyrl-ext[agents]'"
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@rule("turns")
def an_environment_or_an_agent_reads_what_is_set(plan: Plan) -> Found:
    turns = plan.turns
    if turns.kind is not None:
        return
    for name in type(turns).model_fields:
        if changed(turns, name):
            value = show(getattr(turns, name))
            rule = "without turns.environment, turns.agent or turns.command"
            yield name, f"{value} {rule}, expected it left out"


@rule("turns")
def one_of_them_drives_the_trajectories(plan: Plan) -> Found:
    turns = plan.turns
    for name in ("agent", "command"):
        if getattr(turns, name) and turns.kind != name:
            value = show(getattr(turns, name))
            yield name, f"{value} with turns.{turns.kind}, expected only one of them"


@rule("turns")
def agents_alone_have_renderers_and_rewards(plan: Plan) -> Found:
    turns = plan.turns
    if turns.kind != "environment":
        return
    for name in ("reward",) if turns.has_agent else ("renderer", "reward"):
        if changed(turns, name):
            yield name, f"{show(getattr(turns, name))} with turns.environment, expected it left out"


@rule("turns")
def a_command_takes_no_options(plan: Plan) -> Found:
    if plan.turns.kind == "command" and plan.turns.options:
        value = show(plan.turns.options)
        yield "options", f"{value} with turns.command, expected arguments in turns.command"


@rule("turns.environment")
def the_environment_exists(plan: Plan) -> Found:
    name = plan.turns.environment
    if plan.turns.taskset is not None:
        return taskset_problem(plan.turns.taskset, plan.resolve("."))
    if name is not None and not plan.turns.by_source and not _names_environment(name):
        names = ", ".join([*ENVIRONMENTS, BY_SOURCE])
        return f"{show(name)}, expected {names}, module:Class or verifiers:NAME"
    return None


@rule("data.sources")
def the_environment_of_a_source_exists(plan: Plan) -> Found:
    for source, keys in plan.data.sources.items():
        name = keys.environment
        if name is not None and not _names_environment(name):
            rule = f"expected {', '.join(ENVIRONMENTS)}, or module:Class"
            if name.startswith(VERIFIERS):
                rule = "expected it as turns.environment, without data.sources; it brings prompts"
            yield f"{source}.environment", f"{show(name)}, {rule}"


def _names_environment(name: str) -> bool:
    if name.startswith(VERIFIERS):
        return False
    return name in ENVIRONMENTS or _CLASS.fullmatch(name) is not None


@rule("turns")
def the_agent_and_its_packages_exist(plan: Plan) -> Found:
    for name in ("agent", "reward"):
        value = getattr(plan.turns, name)
        if value is not None and not _CLASS.fullmatch(value):
            yield name, f"{show(value)}, expected module:function"
    for package in ("openai", "renderers"):
        if plan.turns.kind in ("agent", "command") and find_spec(package) is None:
            rule = f"expected it. Run {INSTALL}"
            yield str(plan.turns.kind), f"{plan.turns.name} without the package {package}, {rule}"


@rule("turns.command")
def the_program_is_there(plan: Plan) -> Found:
    if plan.turns.command and shutil.which(plan.turns.command[0]) is None:
        return (
            f"{show(plan.turns.command[0])}, expected a program: a path from the working directory "
            "to an executable file, or a name that is on PATH"
        )


@rule("turns.max_tokens")
def a_trajectory_has_room(plan: Plan) -> Found:
    tokens = plan.turns.max_tokens
    most = plan.sizes.max_position_embeddings
    if plan.turns.kind is None:
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


@rule("turns")
def the_environment_gives_the_reward(plan: Plan) -> Found:
    turns = plan.turns
    for name in ("task", "reward"):
        if turns.rewards_all and getattr(plan.data, name) is not None:
            what = f"{turns.name} with data.{name} {getattr(plan.data, name)}"
            yield str(turns.kind), f"{what}, expected only one of them; each brings rewards"


@rule("turns.environment")
def a_taskset_brings_its_prompts(plan: Plan) -> Found:
    if plan.turns.taskset is None:
        return
    if plan.evaluate.sets:
        names = ", ".join(plan.evaluate.sets)
        yield f"{plan.turns.name} with evaluate.sets {names}, expected none; tasks have the rewards"
    for name in ("prompts", "eval_prompts", "chat", "system_prompt", "sources"):
        if changed(plan.data, name):
            value = getattr(plan.data, name)
            text = ", ".join(value) if name == "sources" else show(value)
            rule = "expected it left out; the tasks of the environment have their own"
            yield f"{plan.turns.name} with data.{name} {text}, {rule}"


@rule("turns.options")
def a_taskset_is_named_once(plan: Plan) -> Found:
    if plan.turns.taskset is not None and "id" in plan.turns.options:
        value = show(plan.turns.options["id"])
        rule = f"expected it left out; turns.environment {plan.turns.name} names the taskset"
        return f"id {value}, {rule}"
    return None


@rule("data.sources")
def the_environment_of_a_source_gives_its_reward(plan: Plan) -> Found:
    for source, keys in plan.data.sources.items():
        where = f"data.sources.{source}"
        if keys.environment is None and keys.environment_options:
            rule = f"without {where}.environment, expected it left out"
            yield f"{source}.environment_options", f"{show(keys.environment_options)} {rule}"
        for name in ("task", "reward"):
            value = getattr(keys, name)
            if keys.environment is not None and value is not None:
                what = f"{keys.environment} with {where}.{name} {value}"
                rule = "expected only one of them; each brings rewards"
                yield f"{source}.environment", f"{what}, {rule}"


@rule("turns")
def one_environment_has_one_source(plan: Plan) -> Found:
    turns = plan.turns
    if turns.kind is None or turns.by_source or turns.taskset or not plan.data.sources:
        return
    what = f"{turns.name} with data.sources, expected data.prompts"
    why = f"the {turns.kind} would reward the prompts of all sources"
    also = ""
    if turns.environment is not None:
        also = (
            f". For environments of sources set turns.environment: {BY_SOURCE} and "
            "data.sources.<name>.environment"
        )
    yield turns.kind, f"{what}; {why}{also}"


@rule("data.sources")
def environments_of_sources_are_asked_for(plan: Plan) -> Found:
    for source, keys in plan.data.sources.items():
        if keys.environment is not None and not plan.turns.by_source:
            what = f"{keys.environment} with turns.environment {show(plan.turns.environment)}"
            yield f"{source}.environment", f"{what}, expected turns.environment: {BY_SOURCE}"


@rule("turns")
def sources_bring_environments_and_their_options(plan: Plan) -> Found:
    if not plan.turns.by_source:
        return
    if not plan.environments:
        rule = "expected at least one data.sources.<name>.environment"
        yield "environment", f"{BY_SOURCE} without an environment of a source, {rule}"
    if plan.turns.options:
        rule = "expected them in data.sources.<name>.environment_options"
        value = show(plan.turns.options)
        yield "options", f"{value} with turns.environment {BY_SOURCE}, {rule}"


@rule("data.reward_min_share")
def trajectories_of_sources_have_one_share(plan: Plan) -> Found:
    share = plan.data.reward_min_share
    if plan.turns.by_source and share < 1:
        rule = "expected 1; turns.min_share is of all trajectories"
        return f"{share:g} with turns.environment {BY_SOURCE}, {rule}"


@rule("turns")
def whole_groups_wait_for_their_environments(plan: Plan) -> Found:
    turns = plan.turns
    if turns.kind is not None and plan.rollout.oversample > 1:
        what = f"{turns.name} with rollout.oversample {plan.rollout.oversample:g}, expected 1"
        yield turns.kind, f"{what}; the groups that are kept would be those that end first"


@rule("turns")
def one_rank_talks_to_an_engine(plan: Plan) -> Found:
    turns = plan.turns
    rollout = plan.rollout
    if turns.kind is None or rollout.engine == "recorded" or rollout.tp == 1:
        return
    if plan.transport == "inprocess":
        what = f"{turns.name} with rollout.tp {rollout.tp} and rollout.transport inprocess"
        rule = "expected tp 1 or another transport"
        why = "the ranks of an engine would get turns at different times"
        yield turns.kind, f"{what}, {rule}; {why}"
