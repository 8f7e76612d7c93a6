"""Prompts, rewards and the built-in tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyrl_ext.plan.gym_tasks import gym_option_problems, gym_task_problem, is_gym_task
from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.named_rewards import NAMED_REWARDS, reward_function
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.records import (
    Broken,
    Mistakes,
    check_fields,
    first_records,
    has_chat_template,
    rename,
)
from pyrl_ext.plan.rules._rule import Found, data_file_problem, in_config, relative, rule
from pyrl_ext.plan.task_options import PICTURES, TASK_NAMES, option_problems, task_problem

# Built-in rewards that compare a response with the answer of its record.
_COMPARE = NAMED_REWARDS.values()


@rule("data")
def one_source_of_prompts(plan: Plan) -> Found:
    if plan.has_rollouts and (plan.data.task is None) == (plan.data.prompts is None):
        rule = "expected exactly one of data.task and data.prompts"
        if not plan.data.task:
            return f"neither task nor prompts, {rule}"
        return f"both task and prompts, {rule}. For prompts set task: null, task_options: {{}}"


@rule("data.reward")
def prompts_need_a_reward(plan: Plan) -> Found:
    data = plan.data
    given = data.reward is not None or plan.turns.environment is not None
    if data.task is None and data.prompts is not None and not given:
        return (
            "null with data.prompts, expected module:function; only built-in tasks bring a reward"
        )


@rule("data.task")
def a_task_is_complete(plan: Plan) -> Found:
    data = plan.data
    extra = [name for name in ("reward", "eval_prompts") if getattr(data, name) is not None]
    if data.task is not None and data.prompts is None and extra:
        return f"{data.task} with data.{extra[0]}, expected null; the task brings its own"
    if data.task is None and data.task_options:
        return "null with data.task_options, expected a task; the options would not be read"


@rule("data.task")
def the_task_exists(plan: Plan) -> Found:
    return task_problem(plan.data.task) if plan.data.task is not None else None


@rule("data.task")
def pictures_have_a_model_that_sees(plan: Plan) -> Found:
    if plan.data.task == PICTURES and plan.sizes.vision is None:
        return f"{PICTURES}, expected a model with a vision tower {in_config(plan)}"


@rule("data.task_options")
def the_task_takes_its_options(plan: Plan) -> Found:
    task = plan.data.task
    options = plan.data.task_options
    if task in TASK_NAMES:
        return option_problems(task, options)
    if task is not None and is_gym_task(task) and gym_task_problem(task) is None:
        return gym_option_problems(task, options)


@rule("data.columns")
def columns_are_of_fields(plan: Plan) -> Found:
    if plan.data.columns and plan.data.prompts is None:
        return f"{show(plan.data.columns)} without data.prompts, expected none; nothing reads them"


@rule("data.eval_split")
def a_split_is_of_a_dataset(plan: Plan) -> Found:
    data = plan.data
    if data.eval_split is None:
        return None
    key = "prompts" if data.eval_prompts is None else "eval_prompts"
    name = getattr(data, key)
    if name is None or not plan.is_dataset(name):
        return f"{data.eval_split}, expected null; data.{key} names no folder or dataset"


@rule("data.system_prompt")
def a_system_prompt_is_of_a_chat(plan: Plan) -> Found:
    if plan.data.system_prompt is not None and not plan.data.chat:
        return "set without data.chat, expected data.chat: true; plain prompts have no messages"


@rule("data.chat")
def built_in_tasks_are_no_chat(plan: Plan) -> Found:
    if plan.data.chat and plan.data.task in TASK_NAMES:
        return f"true with data.task {plan.data.task}, expected false; its prompts are symbols"


def _calls_a_worker(plan: Plan) -> bool:
    """True if responses are scored by a function that is not one of this package's tasks."""
    task = plan.data.task
    return plan.data.reward is not None or (task is not None and is_gym_task(task))


@rule("data.reward_timeout")
def a_timeout_has_a_reward_function(plan: Plan) -> Found:
    timeout = plan.data.reward_timeout
    if timeout is not None and not _calls_a_worker(plan):
        return f"{timeout:g} without data.reward, expected null; built-in rewards always return"


@rule("data")
def limits_of_calls_have_a_reward_function(plan: Plan) -> Found:
    if _calls_a_worker(plan):
        return
    for key in ("reward_workers", "reward_concurrency", "reward_retries", "reward_min_share"):
        value = getattr(plan.data, key)
        usual = type(plan.data).model_fields[key].default
        if value != usual:
            yield key, f"{value:g} without data.reward, expected {usual:g}"


@rule("data")
def first_records_have_their_fields(plan: Plan) -> Found:
    for key in ("prompts", "eval_prompts", "path"):
        reward = None if key == "path" else plan.data.reward
        for message in _mistakes(plan, getattr(plan.data, key), reward, key != "path"):
            yield key, message


@rule("evaluate.sets")
def first_records_of_sets_have_their_fields(plan: Plan) -> Found:
    for name, chosen in plan.evaluate.sets.items():
        reward = plan.data.reward if chosen.reward is None else chosen.reward
        for message in _mistakes(plan, chosen.file, reward, True):
            yield f"{name}.file", message


def _mistakes(plan: Plan, name: str | None, reward: str | None, rollouts: bool) -> list[str]:
    """The mistakes in the first records of the file `name`."""
    file = _readable(plan, name)
    if file is None:
        return []
    mistakes = Mistakes()
    looked_at = 0
    try:
        for number, where, record in first_records(file):
            looked_at += 1
            if problem := _problem(record, plan.data.columns, reward, rollouts):
                mistakes.add(number, where, problem)
    except Broken as broken:
        return [f"{relative(file)}: {broken}"]
    if not looked_at:
        return [f"{relative(file)}: no records, expected at least one"]
    return mistakes.lines(f"the first {looked_at} records")


def _problem(
    record: Any, columns: Mapping[str, str], reward: str | None, rollouts: bool
) -> str | None:
    """Why a record cannot be used; None: it can, as far as a plan can tell."""
    if isinstance(record, Broken):
        return str(record)
    try:
        fields = check_fields(rename(record, columns), rollouts)
    except Broken as broken:
        return str(broken)
    if reward_function(reward or "") in _COMPARE and fields.get("answer") is None:
        return str(Broken("no answer", f"one; the reward {reward} compares with it"))
    return None


@rule("model.tokenizer")
def messages_have_a_chat_template(plan: Plan) -> Found:
    name = plan.model.tokenizer
    if name is None or plan.is_hub_id(name):
        return None
    folder = Path(plan.resolve(name))
    if not (folder / "tokenizer.json").is_file() or has_chat_template(folder):
        return None
    why = None
    for key in ("path", "eval_prompts", "prompts"):
        file = _readable(plan, getattr(plan.data, key))
        if file is not None and (where := _first_messages(file)):
            why = f"{where} holds messages"
    if plan.data.chat:
        why = "data.chat is true"
    if plan.turns.environment in ("messages", "tools"):
        why = f"turns.environment {plan.turns.environment} writes messages"
    if why is None:
        return None
    return (
        f"{relative(str(folder))} has no chat template, expected one; {why}, and it turns "
        "messages into text. Put chat_template.jinja there, or use the tokenizer of an instruct "
        "model"
    )


def _first_messages(file: str) -> str | None:
    """The place of the first record with messages, of those that are looked at."""
    with suppress(Broken):  # another rule reports it
        for _, where, record in first_records(file):
            if isinstance(record, dict) and "messages" in record:
                return where
    return None


def _readable(plan: Plan, name: str | None) -> str | None:
    """The path of the data file `name`; None: it cannot be read here, or is of another kind."""
    if name is None or not name.endswith((".jsonl", ".parquet")):
        return None
    if name.endswith(".parquet") and find_spec("pyarrow") is None:
        return None  # which the trainer needs, and a machine for plans may lack
    path = plan.resolve(name)
    return path if os.path.isfile(path) and os.access(path, os.R_OK) else None


@rule("data")
def files_exist(plan: Plan) -> Found:
    for key in ("prompts", "eval_prompts", "path"):
        name = getattr(plan.data, key)
        if name is not None and (message := data_file_problem(plan, name, key != "path")):
            yield key, message
