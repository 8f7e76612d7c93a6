"""Environments of the package verifiers, which worker processes run.

A taskset has tasks, each with a prompt and rewards, and may have code that answers the policy
between its turns.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

from pydantic import ValidationError

from pyrl_ext.data.agent import OPEN_FILES, AgentCall, AgentHost, Stop
from pyrl_ext.data.workers import CallFailed
from pyrl_ext.parallel.open_files import allow_open_files
from pyrl_ext.parallel.user_code import describe, load_module, place_of
from pyrl_ext.plan.tasksets import INSTALL, MOST_TASKS, taskset_module

_HARNESS = "pyrl_chat"


class DescribedTask(NamedTuple):
    """A task as the process that trains sees it.

    Args:
        key: of the task
        text: its prompt
        first: key of the first task with the same data
    """

    key: str
    text: str
    first: str


def load_taskset(name: str, options: Mapping[str, Any]) -> AgentHost:
    """Load a taskset; its host tells about the tasks as `DescribedTask`.

    Args:
        name: of a module that exports a taskset
        options: of the taskset, which its config names

    Raises:
        ValueError: the package or the taskset is missing, or it does not take the options
    """
    allow_open_files(OPEN_FILES)
    taskset = _Taskset(name, options)
    return AgentHost(taskset, None, taskset.about)


class _Taskset:
    """The tasks of a taskset, which the policy plays.

    Args:
        name, options: as of `load_taskset`

    Attributes:
        tasks: by key
        about: of each task
    """

    def __init__(self, name: str, options: Mapping[str, Any]):
        where = f"turns.environment: verifiers:{name}"
        try:
            import verifiers.v1 as vf
            from verifiers.v1.utils.loaders import env_config_type, load_environment
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{where}: {error.name} is not installed, expected it. Run {INSTALL}"
            ) from error
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of tools, which are processes
        chat = import_module("pyrl_ext.data.verifiers_chat")
        sys.modules[_HARNESS] = chat  # the package takes names of modules without a dot
        self._key = chat.KEY
        module = taskset_module(name)
        shipped = f"verifiers.v1.tasksets.{module}"
        load_module(where, shipped if find_spec(shipped) else module)
        try:
            config = env_config_type(name, "")
            agents = [
                agent
                for agent, field in config.model_fields.items()
                if isinstance(field.default, vf.AgentConfig)
            ]
            seat = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}}
            settings = {"taskset": {**options, "id": name}, **{agent: seat for agent in agents}}
            self._env = load_environment(config.model_validate(settings))
            most = MOST_TASKS if self._env.taskset.INFINITE else None
            tasks = [*islice(self._env.taskset, most)]
            self.tasks = {task.key: task for task in tasks}
            self.about = _described(self.tasks)
        except (Exception, SystemExit) as error:  # the taskset's own code may raise anything
            raise ValueError(f"{where}: {_problem(error, options)}") from error
        if len(self.tasks) < len(tasks):
            different = f"{len(tasks)} tasks with {len(self.tasks)} different keys"
            raise ValueError(f"{where} has {different}, expected a key for each")
        if not self.tasks:
            raise ValueError(f"{where} has no tasks, expected some. Set turns.options")
        if len(agents) != 1:
            rule = "expected one, which is the policy"
            raise ValueError(f"{where} has {len(agents)} agents {', '.join(agents)}, {rule}")
        self._stack = AsyncExitStack()
        self._served: asyncio.Task[Any] | None = None

    async def __call__(self, call: AgentCall, stop: Stop) -> dict[str, float]:
        """Play a task: the reward and the metrics of the taskset. Raises: CallFailed."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        task = self.tasks.get((call.prompt.meta or {}).get("task", ""))
        if task is None:
            rule = "expected load() to give the same tasks in each process"
            raise CallFailed("error", f"this worker has no such task, {rule}")
        if self._served is None:
            serving = self._stack.enter_async_context(self._env.serving())
            self._served = asyncio.ensure_future(serving)
        await asyncio.shield(self._served)
        self._key.set(call.key)
        client = EvalClientConfig(base_url=call.url, api_key_var="PYRL_NO_KEY")
        episode = await self._env.run_episode(task, ModelContext(call.model, client))
        return _reward(episode)


def _described(tasks: Mapping[str, Any]) -> list[DescribedTask]:
    first: dict[str, str] = {}
    found: list[DescribedTask] = []
    for key, task in tasks.items():
        data = task.with_data(idx=None).hash
        text = task.data.prompt_text or key
        found.append(DescribedTask(key, text, first.setdefault(data, key)))
    return found


def _problem(error: BaseException, options: Mapping[str, Any]) -> str:
    """Why a taskset does not load: options that it does not take, or an error of its code."""
    details = error.errors(include_url=False) if isinstance(error, ValidationError) else []
    if not details or any(each["loc"][:1] != ("taskset",) for each in details):
        place = place_of(error, ["verifiers", "pydantic"])
        rule = f"expected a taskset that loads with turns.options {dict(options)}"
        return f"{describe(error)}{place}, {rule}"
    problems: list[str] = []
    for each in details:
        option = ".".join(["turns.options", *map(str, each["loc"][1:])])
        value = each["input"] if each["loc"][1:] else dict(options)
        shown = "" if each["type"] == "missing" else f" is {value!r}"
        problems.append(f"{option}{shown}: {each['msg']}")
    return f"{'; '.join(problems)}. Expected settings of the taskset"


def _reward(episode: Any) -> dict[str, float]:
    """The reward of an episode as "reward", and its metrics, named as `read_reward` takes them:
    judge/brief becomes judge_brief. Raises: CallFailed."""
    errors = [*episode.errors]
    for trace in episode.traces:
        errors += trace.errors
    if errors or not episode.ok:
        last = errors[-1] if errors else None
        text = f"{last.type}: {last.message}" if last else "the episode failed without an error"
        trace = "" if last is None else str(last.traceback or "")
        raise CallFailed("error", text, trace)
    if len(episode.traces) != 1:
        text = f"played {len(episode.traces)} times, expected once"
        raise CallFailed("error", text)
    (trace,) = episode.traces
    if trace.is_timeout:
        raise CallFailed(
            "timeout", f"exceeded a time limit of the taskset ({trace.stop_condition})"
        )
    parts = {**trace.metrics}
    if len(trace.rewards) > 1:
        parts |= {name: reward and reward.value for name, reward in trace.rewards.items()}
    components = {
        re.sub(r"[^\w.-]", "_", name): value for name, value in parts.items() if value is not None
    }
    return {**components, "reward": trace.reward}
