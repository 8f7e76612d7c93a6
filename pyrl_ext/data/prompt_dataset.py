"""The prompts of a run, and how their responses are scored."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pyrl_ext.data.chat import Chat, check_known, encoded
from pyrl_ext.data.chat_turns import check_template
from pyrl_ext.data.dataset_rows import open_data
from pyrl_ext.data.environment import EnvironmentHost
from pyrl_ext.data.files import Broken, open_records
from pyrl_ext.data.gym_task import GymTask
from pyrl_ext.data.images import ImageReader, Scale
from pyrl_ext.data.pictures import Pictures
from pyrl_ext.data.prompts import PromptSource, load_prompts
from pyrl_ext.data.rewards import Reward, Scorer, WorkerReward, load_reward
from pyrl_ext.data.sft import SftEncoder, SftSource
from pyrl_ext.data.tasks import Task
from pyrl_ext.data.tokenizer import Tokenizer, load_tokenizer
from pyrl_ext.data.workers import Pool
from pyrl_ext.parallel.launch import launched
from pyrl_ext.plan import Plan
from pyrl_ext.plan.gym_tasks import is_gym_task
from pyrl_ext.plan.task_options import PICTURES
from pyrl_ext.samples import Prompt

_MAX_WORKERS = 8  # of environments, on a rank


AnyReward = Reward | WorkerReward


@dataclass(frozen=True)
class EvalPrompts:
    """A further set of prompts to evaluate on, and how their responses are scored."""

    prompts: Sequence[Prompt]
    reward: AnyReward


@dataclass(frozen=True)
class PromptDataset:
    """Prompts of the run, and how their responses are scored.

    Args:
        prompts:  ``take(step, n)`` and ``held_out(n)``.
        reward:   (prompt, text, tokens) -> number.
        tokenizer: of the model.
        stop_ids: tokens that end a response.
        environments: worker processes of the environment, which gives rewards; None: `reward`
            does.
        sets: further sets to evaluate on, by name.
    """

    prompts: Task | GymTask | Pictures | PromptSource
    reward: AnyReward
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    environments: Pool | None = None
    sets: Mapping[str, EvalPrompts] = field(default_factory=dict[str, EvalPrompts])

    def scorer(self, prompts: Sequence[Prompt], reward: AnyReward | None = None) -> Scorer:
        """Scores samples of ``prompts``; ``reward``: None is the run's."""
        chosen = self.reward if reward is None else reward
        return Scorer(prompts, chosen, self.tokenizer.decode, self.stop_ids)

    def close(self) -> None:
        """Stop the worker processes of user code."""
        for reward in (self.reward, *(each.reward for each in self.sets.values())):
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
    records = open_records(plan.records_path)
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
    if plan.data.task is not None and is_gym_task(plan.data.task):
        return _gym_source(plan, plan.data.task, tokenizer, stop_ids)
    if plan.data.task is not None:
        task = _task(plan, plan.data.task, tokenizer, stop_ids[0])
        sets = _eval_sets(plan, tokenizer, task.reward)
        return PromptDataset(task, task.reward, tokenizer, stop_ids, None, sets)
    data = plan.data
    assert data.prompts is not None  # a rule says so
    environments = None
    reward: AnyReward = no_reward
    if plan.turns.environment is not None:
        forks = plan.turns.form == "stepwise"
        check_template(plan.turns.environment, tokenizer, stop_ids, forks)
        host = partial(
            EnvironmentHost.load,
            plan.turns.environment,
            plan.turns.options,
            tokenizer=partial(load_tokenizer, plan.tokenizer_path),
            stop_ids=stop_ids,
            forks=forks,
        )
        key = f"turns.environment: {plan.turns.environment!r}"
        cores = (os.cpu_count() or 1) // launched("LOCAL_WORLD_SIZE", 1)
        environments = Pool(key, host, max(1, min(_MAX_WORKERS, cores)))
    elif plan.data.reward is not None:
        reward = _reward(plan, plan.data.reward)
    prompts = _load(plan, data.prompts, data.split, data.subset, tokenizer, reward)
    held_out = None
    if data.eval_prompts is not None or data.eval_split is not None:
        name = data.eval_prompts or data.prompts
        split = data.eval_split or data.split
        subset = data.subset if data.eval_prompts is None else None
        held_out = _load(plan, name, split, subset, tokenizer, reward)
    source = PromptSource(prompts, held_out, plan.seed, plan.data.shuffle)
    sets = _eval_sets(plan, tokenizer, reward)
    return PromptDataset(source, reward, tokenizer, stop_ids, environments, sets)


def _reward(plan: Plan, name: str) -> AnyReward:
    data = plan.data
    return load_reward(
        name,
        timeout=data.reward_timeout,
        workers=data.reward_workers,
        concurrency=data.reward_concurrency,
        retries=data.reward_retries,
        drops=data.reward_min_share < 1,
    )


def _eval_sets(plan: Plan, tokenizer: Tokenizer, reward: AnyReward) -> dict[str, EvalPrompts]:
    """The sets of ``evaluate.sets``; ``reward``: of those that name none."""
    sets: dict[str, EvalPrompts] = {}
    rewards: dict[str | None, AnyReward] = {None: reward, plan.data.reward: reward}
    for name, chosen in plan.evaluate.sets.items():
        if chosen.reward not in rewards:
            assert chosen.reward is not None
            rewards[chosen.reward] = _reward(plan, chosen.reward)
        own = rewards[chosen.reward]
        prompts = _load(plan, chosen.file, chosen.split, chosen.subset, tokenizer, own)
        first = [replace(p, id=-1 - i) for i, p in enumerate(prompts[: chosen.prompts])]
        sets[name] = EvalPrompts(first, own)
    return sets


def _load(
    plan: Plan,
    name: str,
    split: str,
    subset: str | None,
    tokenizer: Tokenizer,
    reward: AnyReward,
) -> list[Prompt]:
    """The prompts of a file, folder or dataset."""
    records = open_data(plan, name, split, subset)
    rule = getattr(reward, "answer_rule", None)
    reader = image_reader(plan, str(records.path))
    limit = plan.data.max_prompt_tokens
    return load_prompts(records, tokenizer, limit, rule, reader, _chat(plan))


def _chat(plan: Plan) -> Chat | None:
    return Chat(plan.data.system_prompt) if plan.data.chat else None


def _gym_source(
    plan: Plan, task: str, tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> PromptDataset:
    """The prompts of a task of reasoning-gym, which its own scorers score in a worker process."""
    chat = _chat(plan)

    def encode(question: str) -> list[int]:
        try:
            text = question if chat is None else chat.render(question, tokenizer)
            tokens = encoded(text, tokenizer, add_special_tokens=chat is None)
            check_known(text, tokens, tokenizer)
        except Broken as broken:
            raise ValueError(f"data.task: {task}: {broken}") from None
        return tokens

    limit = plan.data.max_prompt_tokens
    prompts = GymTask(task, encode, limit, plan.seed, plan.data.task_options)
    prompts.take(0, 1)  # what does not work fails now
    reward = _reward(plan, "pyrl_ext.data.gym_task:score")
    sets = _eval_sets(plan, tokenizer, reward)
    return PromptDataset(prompts, reward, tokenizer, stop_ids, None, sets)


def no_reward(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """Stands where an environment gives the reward."""
    raise RuntimeError(f"no_reward(prompt {prompt.id}): expected the environment to reward it")


def _task(plan: Plan, name: str, tokenizer: Tokenizer, eos_id: int) -> Task | Pictures:
    options = dict(plan.data.task_options)
    if name == PICTURES:
        if (reader := image_reader(plan)) is None:
            raise ValueError(f"data.task: {name}, expected a model with an image token")
        return Pictures(tokenizer, reader, eos_id, plan.seed, options)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return Task(name, encode, eos_id, plan.seed, options)
