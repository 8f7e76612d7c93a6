"""The prompts of a run, and how their responses are scored."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pyrl_ext.data.agent import AgentHost
from pyrl_ext.data.chat import Chat, check_known, encoded
from pyrl_ext.data.chat_turns import check_template
from pyrl_ext.data.dataset_rows import open_data
from pyrl_ext.data.environment import EnvironmentHost
from pyrl_ext.data.files import Broken, cut, open_records
from pyrl_ext.data.gym_task import GymTask
from pyrl_ext.data.images import ImageReader, Scale
from pyrl_ext.data.mixed_prompts import MixedPrompts, Prompts
from pyrl_ext.data.pictures import Pictures
from pyrl_ext.data.prompts import PromptSource, load_prompts
from pyrl_ext.data.recordings import RecordedSamples
from pyrl_ext.data.rewards import Reward, Scorer, WorkerReward, load_reward
from pyrl_ext.data.rising_task import RisingTask
from pyrl_ext.data.sft import SftEncoder, SftSource
from pyrl_ext.data.tasks import Task
from pyrl_ext.data.tasksets import DescribedTask, load_taskset
from pyrl_ext.data.tokenizer import Tokenizer, load_tokenizer
from pyrl_ext.data.workers import Pool
from pyrl_ext.parallel.launch import launched
from pyrl_ext.plan import Plan
from pyrl_ext.plan.gym_tasks import is_gym_task
from pyrl_ext.plan.named_rewards import reward_function
from pyrl_ext.plan.schema import PromptKeys
from pyrl_ext.plan.task_options import PICTURES
from pyrl_ext.samples import Prompt

_MAX_WORKERS = 8  # of environments, on a rank


AnyReward = Reward | WorkerReward


@dataclass(frozen=True)
class EvalPrompts:
    """A further set of prompts to evaluate on, and how their responses are scored."""

    prompts: Sequence[Prompt]
    reward: AnyReward | None


@dataclass(frozen=True)
class PromptDataset:
    """Prompts of the run, and how their responses are scored.

    Args:
        prompts:  that are trained on, and held-out ones.
        reward:   (prompt, text, tokens) -> number; by name with several sources of prompts. None:
            an environment or an agent gives it.
        tokenizer: of the model.
        stop_ids: tokens that end a response.
        environments: worker processes of environments or agents, which give rewards.
        sets: further sets to evaluate on, by name.
    """

    prompts: Prompts
    reward: AnyReward | Mapping[str, AnyReward | None] | None
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    environments: Pool | None = None
    sets: Mapping[str, EvalPrompts] = field(default_factory=dict[str, EvalPrompts])

    def scorer(self, prompts: Sequence[Prompt], reward: AnyReward | None = None) -> Scorer:
        """Scores samples of ``prompts``; ``reward``: None is the run's."""
        chosen = self.reward if reward is None else reward
        return Scorer(prompts, chosen, self.tokenizer.decode, self.stop_ids)

    @property
    def rising(self) -> dict[str, RisingTask]:
        """Tasks that become harder, by source."""
        if not isinstance(self.prompts, MixedPrompts):
            return {}
        sources = self.prompts.sources.items()
        return {name: each for name, each in sources if isinstance(each, RisingTask)}

    def close(self) -> None:
        """Stop the worker processes of user code."""
        own = self.reward.values() if isinstance(self.reward, Mapping) else [self.reward]
        for reward in (*own, *(each.reward for each in self.sets.values())):
            if isinstance(reward, WorkerReward):
                reward.close()
        if self.environments is not None:
            self.environments.close()


def image_reader(plan: Plan, file: str = ".") -> ImageReader | None:
    """Reads images, whose paths are relative to the folder of ``file``; None: the model takes no
    images."""
    token = plan.hf.get("image_token_id", plan.hf.get("media_placeholder_token_id"))
    if token is None or plan.tokenizer_path is None:
        return None
    return ImageReader(plan.tokenizer_path, Path(file).parent, token)


def image_scale(plan: Plan) -> Scale:
    """Scaling of patches by the model's image processor.

    Raises:
        DataError: the folder of the tokenizer holds no processor.
        ValueError: the plan names no folder, or the model no placeholder of images.
    """
    if (reader := image_reader(plan)) is None:
        raise ValueError(
            f"image_scale: model.tokenizer {plan.model.tokenizer}, expected a folder with the "
            "tokenizer and image processor of a model that has an image token"
        )
    return reader.scale


def build_records(plan: Plan) -> SftSource:
    """The records of a run without rollouts, not looked at yet.

    Raises:
        DataError: the file or the tokenizer cannot be opened.
        ValueError: no record is left to train on.
    """
    assert plan.records_path is not None  # the compiler says so
    tokenizer = None if plan.tokenizer_path is None else load_tokenizer(plan.tokenizer_path)
    data = plan.data
    reader = image_reader(plan, plan.records_path)
    encode = SftEncoder(tokenizer, plan.sizes.vocab_size, data.max_tokens, data.truncate, reader)
    path = Path(plan.records_path)
    records = RecordedSamples(path) if path.is_dir() else open_records(path)
    return SftSource(records, encode, data.held_out, plan.seed, data.shuffle)


def build_source(plan: Plan) -> PromptDataset:
    """Read prompts, tokenizer and reward; every problem of a prompt file is reported at once.

    Raises:
        DataError: a prompt file or the tokenizer cannot be used.
        ValueError: the task or the reward cannot be used.
    """
    if plan.tokenizer_path is None:
        raise ValueError(
            "model.tokenizer: null, expected the folder or the hub id of a tokenizer; prompts are "
            "encoded with it"
        )
    tokenizer = load_tokenizer(plan.tokenizer_path)
    eos = plan.hf.get("eos_token_id")
    stop_ids = tuple(eos) if isinstance(eos, list) else (tokenizer.eos_token_id,)
    environments = None
    if plan.turns.kind is not None:
        environments = _workers(plan, tokenizer, stop_ids)
    if plan.turns.taskset is not None:
        assert environments is not None
        prompts = _taskset_prompts(plan, tokenizer, environments.about)
        return PromptDataset(prompts, None, tokenizer, stop_ids, environments)
    build = _Builder(plan, tokenizer, stop_ids)
    sources = {name: build.source(name) for name in plan.data.sources}
    if not sources:
        prompts, reward = build.source(None)
    else:
        streams = {name: prompts for name, (prompts, _) in sources.items()}
        prompts = MixedPrompts(streams, plan.source_weights, plan.seed)
        reward = {name: own for name, (_, own) in sources.items()}
    sets = build.eval_sets(reward)
    return PromptDataset(prompts, reward, tokenizer, stop_ids, environments, sets)


def _workers(plan: Plan, tokenizer: Tokenizer, stop_ids: tuple[int, ...]) -> Pool:
    """The worker processes of the environment, or of the agent."""
    turns = plan.turns
    cores = (os.cpu_count() or 1) // launched("LOCAL_WORLD_SIZE", 1)
    workers = max(1, min(_MAX_WORKERS, cores))
    what = f"turns.{turns.kind}: {turns.name!r}"
    if turns.taskset is not None:
        return Pool(what, partial(load_taskset, turns.taskset, turns.options), workers)
    if turns.environment is None:
        host = partial(AgentHost.load, turns.agent, turns.command, turns.options, turns.reward)
        return Pool(what, host, workers)
    assert plan.tokenizer_path is not None
    forks = turns.form == "stepwise"
    for environment in plan.environments.values():
        check_template(environment.name, tokenizer, forks)
    host = partial(
        EnvironmentHost.load,
        plan.environments,
        tokenizer=partial(load_tokenizer, plan.tokenizer_path),
        stop_ids=stop_ids,
        forks=forks,
    )
    return Pool(what, host, workers)


def _taskset_prompts(
    plan: Plan, tokenizer: Tokenizer, tasks: Sequence[DescribedTask]
) -> PromptSource:
    """The tasks of an environment that brings them, as prompts. What the policy reads, the
    environment writes: with system prompts and tools."""
    prompts: list[Prompt] = []
    for task in tasks:
        tokens = encoded(task.text, tokenizer, add_special_tokens=False)
        prompts.append(Prompt(len(prompts), tuple(tokens), None, task.text, {"task": task.key}))
    return PromptSource(
        prompts, None, plan.seed, plan.data.shuffle, lambda prompt: tasks[prompt.id].first
    )


class _Builder:
    """Builds the sources of prompts and the sets to evaluate on.

    Rewards with the same name share their workers.
    """

    def __init__(self, plan: Plan, tokenizer: Tokenizer, stop_ids: tuple[int, ...]):
        self.plan = plan
        self.tokenizer = tokenizer
        self.eos_id = stop_ids[0]
        self._rewards: dict[str, AnyReward] = {}

    def source(self, name: str | None) -> tuple[Prompts, AnyReward | None]:
        """The prompts and the reward of a source of data.sources; None: of data itself."""
        if name is None:
            return self._stream(self.plan.data, "train", "data")
        keys = self.plan.data.sources[name]
        where = f"{name}/train", f"data.sources.{name}"
        if not keys.levels:
            return self._stream(keys, *where)
        levels: list[Prompts] = []
        reward: AnyReward | None = None
        for options in keys.levels:
            level = keys.model_copy(update={"task_options": keys.task_options | options})
            prompts, reward = self._stream(level, *where)
            levels.append(prompts)
        assert keys.rise_at is not None  # a rule says so
        return RisingTask(levels, keys.rise_at, self.plan.rollout.ahead), reward

    def eval_sets(
        self, reward: AnyReward | Mapping[str, AnyReward | None] | None
    ) -> dict[str, EvalPrompts]:
        """The sets of ``evaluate.sets``; ``reward``: of those that name none."""
        sets: dict[str, EvalPrompts] = {}
        for name, chosen in self.plan.evaluate.sets.items():
            if chosen.reward is not None:
                own = self._reward(chosen.reward)
            else:
                assert not isinstance(reward, Mapping)  # a rule says so
                own = reward
            data = self.plan.data
            prompts = self._load(data, chosen.file, chosen.split, chosen.subset, own)
            first = [replace(p, id=-1 - i) for i, p in enumerate(prompts[: chosen.prompts])]
            sets[name] = EvalPrompts(first, own)
        return sets

    def _stream(self, keys: PromptKeys, stream: str, key: str) -> tuple[Prompts, AnyReward | None]:
        if keys.task is None:
            return self._files(keys)
        if is_gym_task(keys.task):
            return self._gym_task(keys, keys.task, stream, key)
        task = self._task(keys, keys.task, stream, key)
        return task, task.reward

    def _files(self, keys: PromptKeys) -> tuple[PromptSource, AnyReward | None]:
        assert keys.prompts is not None  # a rule says so
        reward = None if keys.reward is None else self._reward(keys.reward)
        prompts = self._load(keys, keys.prompts, keys.split, keys.subset, reward)
        held_out = None
        if keys.eval_prompts is not None or keys.eval_split is not None:
            name = keys.eval_prompts or keys.prompts
            split = keys.eval_split or keys.split
            subset = keys.subset if keys.eval_prompts is None else None
            held_out = self._load(keys, name, split, subset, reward)
        source = PromptSource(prompts, held_out, self.plan.seed, self.plan.data.shuffle)
        return source, reward

    def _load(
        self, keys: PromptKeys, name: str, split: str, subset: str | None, reward: AnyReward | None
    ) -> list[Prompt]:
        """The prompts of a file, folder or dataset."""
        records = open_data(self.plan, name, split, subset, keys.columns)
        rule = getattr(reward, "answer_rule", None)
        reader = image_reader(self.plan, str(records.path))
        limit = self.plan.data.max_prompt_tokens
        return load_prompts(records, self.tokenizer, limit, rule, reader, _chat(keys))

    def _reward(self, name: str) -> AnyReward:
        function = reward_function(name)
        if function not in self._rewards:
            data = self.plan.data
            self._rewards[function] = load_reward(
                function,
                timeout=data.reward_timeout,
                workers=data.reward_workers,
                concurrency=data.reward_concurrency,
                retries=data.reward_retries,
                drops=data.reward_min_share < 1,
            )
        return self._rewards[function]

    def _gym_task(
        self, keys: PromptKeys, task: str, stream: str, key: str
    ) -> tuple[GymTask, AnyReward]:
        """The prompts of a task of reasoning-gym, and their reward: without one in the config, the
        task's scorer, in a worker."""
        chat = _chat(keys)

        def encode(question: str) -> list[int]:
            try:
                text = question if chat is None else chat.render(question, self.tokenizer)
                tokens = encoded(text, self.tokenizer, add_special_tokens=chat is None)
                check_known(text, tokens, self.tokenizer)
            except Broken as broken:
                raise ValueError(f"{key}.task: {task}: {broken}") from None
            return tokens

        limit = self.plan.data.max_prompt_tokens
        prompts = GymTask(task, encode, limit, self.plan.seed, keys.task_options, stream, key)
        [first] = prompts.take(0, 1)  # what does not work fails now
        reward = self._reward(keys.reward or "pyrl_ext.data.gym_task:score")
        rule = getattr(reward, "answer_rule", None)
        if rule is not None and not rule[1](first.answer):
            raise ValueError(
                f"{key}.reward: {keys.reward}, expected a reward that takes the answers of {task}, "
                f"such as {cut(first.answer)}; it compares with {rule[0]}. Leave it out for the "
                "task's scorer"
            )
        return prompts, reward

    def _task(self, keys: PromptKeys, name: str, stream: str, key: str) -> Task | Pictures:
        options = dict(keys.task_options)
        seed = self.plan.seed
        if name == PICTURES:
            if (reader := image_reader(self.plan)) is None:
                raise ValueError(f"{key}.task: {name}, expected a model with an image token")
            return Pictures(self.tokenizer, reader, self.eos_id, seed, options, stream)

        def encode(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return Task(name, encode, self.eos_id, seed, options, stream)


def _chat(keys: PromptKeys) -> Chat | None:
    return Chat(keys.system_prompt) if keys.chat else None
