"""A whole run with an environment of the package verifiers: its rewards are those of the game."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.utils.loaders import taskset_class

from pyrl_ext import train
from pyrl_ext.data.guess import Guess
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.data.recordings import load_samples
from pyrl_ext.plan import compile_plan
from pyrl_ext.prompt import Prompt
from pyrl_ext.samples import Sample
from tests.helpers.rows import numbers
from tests.helpers.tiny import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

EXAMPLES = CONFIG.parent / "examples"


def tasks() -> dict[str, Any]:
    """The games of the example by key, as verifiers loads them."""
    taskset: Any = taskset_class("guess_taskset")
    options = {"id": "guess_taskset", "guesses": 4, "higher": "+", "lower": "-"}
    config = taskset.__orig_bases__[0].__args__[1].model_validate(options)
    return {task.key: task.data for task in taskset(config)}


def reward_of(sample: Sample, data: Any, tokenizer: Any) -> float:
    """The reward of the game by the environment class, which has the same rules."""
    game = Guess(4, "+", "-", "?")
    game.start(Prompt(0, (), data.number, meta={"range": (data.low, data.high)}))
    results: list[Any] = []
    for begin, end in sample.spans:
        text = tokenizer.decode(sample.tokens[begin:end].tolist())
        results.append(game.step([], text if text.isdecimal() else ""))
    assert results[-1].done
    return sum(result.reward for result in results)


def test_a_run_trains_on_the_games_of_a_taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = EXAMPLES / "verifiers.yaml"
    changes = {
        "run": tmp_path / "run",
        "rollout.record": tmp_path / "samples",
        "steps": 2,
        "batching.prompts": 8,
        "evaluate.prompts": 8,
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    assert train.main([str(config), *overrides]) == 0
    plan = compile_plan(config, overrides)
    source = build_source(plan)
    games = tasks()
    held_out = {prompt.meta["task"] for prompt in source.prompts.held_out(1000) if prompt.meta}
    assert len(games) == 210 and len(held_out) == 26
    rows = [row for row in numbers(tmp_path / "run") if "reward" in row]
    files = sorted((tmp_path / "samples").glob("*.safetensors"))
    assert len(rows) == len(files) == 2
    for step, (row, file) in enumerate(zip(rows, files, strict=True)):
        prompts = {prompt.id: prompt for prompt in source.prompts.take(step, 8)}
        samples = load_samples(file)
        assert len(samples) == 8 * plan.batching.samples_per_prompt
        rewards: list[float] = []
        for sample in samples:
            key = (prompts[sample.prompt_id].meta or {})["task"]
            assert key not in held_out
            opening = source.tokenizer.decode(sample.tokens[: sample.prompt_len].tolist())
            assert games[key].prompt in opening
            rewards.append(reward_of(sample, games[key], source.tokenizer))
        assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert sum(rewards) > 0
    source.close()
