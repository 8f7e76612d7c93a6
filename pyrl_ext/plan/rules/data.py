"""Prompts, rewards and the built-in tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
from pyrl_ext.plan.rules._rule import (
    Found,
    changed,
    data_file_problem,
    in_config,
    relative,
    rule,
)
from pyrl_ext.plan.schema import PromptKeys, SourceKeys
from pyrl_ext.plan.schema.evaluate import HELD_OUT
from pyrl_ext.plan.task_options import PICTURES, TASK_NAMES, option_problems, task_problem
from pyrl_ext.schedule.shares import Shares

_SOURCE = re.compile(r"[A-Za-z0-9][\w-]*")
_OF_SETS = ("columns", "chat", "system_prompt")  # keys of data that evaluate.sets read
# Built-in rewards that compare a response with the answer of its record.
_COMPARE = NAMED_REWARDS.values()


@rule("data")
def one_source_of_prompts(plan: Plan) -> Found:
    if not plan.has_rollouts or plan.turns.taskset is not None:
        return
    for name, keys in plan.prompt_keys.items():
        if (keys.task is None) != (keys.prompts is None):
            continue
        rule = "expected exactly one of data.task, data.prompts and data.sources"
        if name:
            rule = f"expected exactly one of data.{name}task and data.{name}prompts"
        problem = f"both task and prompts, {rule}. For prompts set task: null, task_options: {{}}"
        if keys.task is None:
            problem = f"neither task nor prompts, {rule}"
        yield (name.removesuffix("."), problem) if name else problem


@rule("data")
def sources_stand_alone(plan: Plan) -> Found:
    data = plan.data
    for name in PromptKeys.model_fields if data.sources else ():
        if not changed(data, name) or (name in _OF_SETS and plan.evaluate.sets):
            continue
        also = "; only evaluate.sets would read it" if name in _OF_SETS else ""
        value = show(getattr(data, name))
        yield name, f"{value} with data.sources, expected it in each source{also}"


@rule("data.sources")
def sources_have_names(plan: Plan) -> Found:
    for name in plan.data.sources:
        if not _SOURCE.fullmatch(name) or name == HELD_OUT or name in plan.evaluate.sets:
            rule = f"expected letters, digits, _ and -, not {HELD_OUT}, and no set of evaluate.sets"
            yield f"{name!r} as the name of a source, {rule}"


@rule("data.sources")
def each_source_is_evaluated(plan: Plan) -> Found:
    asked = plan.evaluate.prompts
    if not plan.data.sources or not plan.evaluate_every or not asked:
        return
    weights = plan.source_weights
    for name, count in Shares(weights).before(asked).items():
        if not count:
            yield (
                f"{name}.weight",
                f"{weights[name]:g}, expected a share of at least one of evaluate.prompts {asked}. "
                "Raise the weight or evaluate.prompts",
            )


@rule("data")
def prompts_need_a_reward(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        given = keys.reward is not None or plan.turns.rewards_all
        if isinstance(keys, SourceKeys) and keys.environment is not None:
            given = True
        if keys.task is None and keys.prompts is not None and not given:
            yield (
                f"{name}reward",
                f"null with data.{name}prompts, expected module:function; only built-in tasks "
                "bring a reward",
            )


@rule("data")
def a_task_is_complete(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        where = f"data.{name}"
        brings = ["reward", "eval_prompts"]
        if keys.task is not None and is_gym_task(keys.task):
            brings = ["eval_prompts"]  # a reward takes the place of the package's scorer
        extra = [key for key in brings if getattr(keys, key) is not None]
        if keys.task is not None and keys.prompts is None and extra:
            yield (
                f"{name}task",
                f"{keys.task} with {where}{extra[0]}, expected null; the task brings its own",
            )
        if keys.task is None and keys.task_options:
            yield (
                f"{name}task",
                f"null with {where}task_options, expected a task; the options would not be read",
            )


@rule("data")
def the_task_exists(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        if keys.task is not None and (problem := task_problem(keys.task)):
            yield f"{name}task", problem


@rule("data")
def pictures_have_a_model_that_sees(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        if keys.task == PICTURES and plan.sizes.vision is None:
            problem = f"{PICTURES}, expected a model with a vision tower {in_config(plan)}"
            yield f"{name}task", problem


@rule("data")
def the_task_takes_its_options(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        for problem in _option_problems(keys.task, keys.task_options):
            if isinstance(problem, str):
                yield f"{name}task_options", problem
            else:
                yield f"{name}task_options.{problem[0]}", problem[1]


def _option_problems(
    task: str | None, options: Mapping[str, Any]
) -> Iterable[str | tuple[str, str]]:
    """Problems of the options of a task: (option, message), or a message about all of them."""
    if task in TASK_NAMES:
        return option_problems(task, options)
    if task is not None and is_gym_task(task) and gym_task_problem(task) is None:
        return gym_option_problems(task, options)
    return ()


@rule("data.sources")
def levels_are_of_a_task(plan: Plan) -> Found:
    for name, source in plan.data.sources.items():
        count = len(source.levels)
        if (count == 0) != (source.rise_at is None):
            what = f"{show(source.rise_at)} with {count} levels"
            yield f"{name}.rise_at", f"{what}, expected both levels and rise_at, or none of them"
        elif count == 1:
            rule = "expected at least two. For one, put its options into task_options"
            yield f"{name}.levels", f"1 level, {rule}"
        elif count and source.task is None:
            where = f"data.sources.{name}.task"
            yield f"{name}.levels", f"set without {where}, expected a task; a file has no options"


@rule("data.sources")
def the_task_takes_the_options_of_its_levels(plan: Plan) -> Found:
    for name, source in plan.data.sources.items():
        for number, level in enumerate(source.levels, start=1):
            if "held_out" in level:
                yield (
                    f"{name}.levels",
                    f"level {number}: held_out {show(level['held_out'])}, expected it in "
                    f"task_options; other levels would train on what this one holds out",
                )
            for problem in _option_problems(source.task, source.task_options | level):
                text = problem if isinstance(problem, str) else f"{problem[0]}: {problem[1]}"
                yield f"{name}.levels", f"level {number}: {text}"


@rule("data")
def columns_are_of_fields(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        if keys.columns and keys.prompts is None:
            shown = show(keys.columns)
            rule = f"without data.{name}prompts, expected none; nothing reads them"
            yield f"{name}columns", f"{shown} {rule}"


@rule("data")
def a_split_is_of_a_dataset(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        if keys.eval_split is None:
            continue
        key = "prompts" if keys.eval_prompts is None else "eval_prompts"
        file = getattr(keys, key)
        if file is None or not plan.is_dataset(file):
            rule = f"expected null; data.{name}{key} names no folder or dataset"
            yield f"{name}eval_split", f"{keys.eval_split}, {rule}"


def _rendered_by(plan: Plan) -> Mapping[str, PromptKeys]:
    """`Plan.prompt_keys`, and those of data itself where sets of held-out prompts read them."""
    if plan.data.sources and plan.evaluate.sets:
        return {**plan.prompt_keys, "": plan.data}
    return plan.prompt_keys


@rule("data")
def a_system_prompt_is_of_a_chat(plan: Plan) -> Found:
    for name, keys in _rendered_by(plan).items():
        if keys.system_prompt is not None and not keys.chat:
            chat = f"data.{name}chat"
            yield (
                f"{name}system_prompt",
                f"set without {chat}, expected {chat}: true; plain prompts have no messages",
            )


@rule("data")
def built_in_tasks_are_no_chat(plan: Plan) -> Found:
    for name, keys in plan.prompt_keys.items():
        if keys.chat and keys.task in TASK_NAMES:
            what = f"true with data.{name}task {keys.task}"
            yield f"{name}chat", f"{what}, expected false; its prompts are symbols"


def _calls_a_worker(plan: Plan) -> bool:
    """True if responses are scored by a function that is not one of this package's tasks."""
    for keys in plan.prompt_keys.values():
        if keys.reward is not None or (keys.task is not None and is_gym_task(keys.task)):
            return True
    return False


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
    for message in _mistakes(plan, plan.data.path, None, plan.data.columns, False):
        yield "path", message
    for name, keys in plan.prompt_keys.items():
        for key in ("prompts", "eval_prompts"):
            file = getattr(keys, key)
            for message in _mistakes(plan, file, keys.reward, keys.columns, True):
                yield f"{name}{key}", message


@rule("evaluate.sets")
def first_records_of_sets_have_their_fields(plan: Plan) -> Found:
    for name, chosen in plan.evaluate.sets.items():
        reward = plan.data.reward if chosen.reward is None else chosen.reward
        for message in _mistakes(plan, chosen.file, reward, plan.data.columns, True):
            yield f"{name}.file", message


def _mistakes(
    plan: Plan, name: str | None, reward: str | None, columns: Mapping[str, str], rollouts: bool
) -> list[str]:
    """The mistakes in the first records of the file `name`."""
    file = _readable(plan, name)
    if file is None:
        return []
    mistakes = Mistakes()
    looked_at = 0
    try:
        for number, where, record in first_records(file):
            looked_at += 1
            if problem := _problem(record, columns, reward, rollouts):
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
    for _, file in _data_files(plan):
        path = _readable(plan, file)
        if why is None and path is not None and (where := _first_messages(path)):
            why = f"{where} holds messages"
    for name, keys in _rendered_by(plan).items():
        if keys.chat:
            why = f"data.{name}chat is true"
    if plan.turns.has_agent:
        why = f"turns.{plan.turns.kind} {plan.turns.name} writes messages"
    for environment in plan.environments.values():
        if environment.name in ("messages", "tools"):
            why = f"{environment.key} {environment.name} writes messages"
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


def _data_files(plan: Plan) -> Iterator[tuple[str, str | None]]:
    """(key below data, name) of each file of records."""
    for name, keys in plan.prompt_keys.items():
        yield f"{name}prompts", keys.prompts
        yield f"{name}eval_prompts", keys.eval_prompts
    yield "path", plan.data.path


@rule("data")
def files_exist(plan: Plan) -> Found:
    for key, name in _data_files(plan):
        if name is not None and (message := data_file_problem(plan, name, key != "path")):
            yield key, message
