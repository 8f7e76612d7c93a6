"""Runs in which one source of prompts has an environment, and others have a reward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pyrl_ext import train
from pyrl_ext.data.guess import Guess
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.data.recordings import load_samples
from pyrl_ext.data.tasks import credit
from pyrl_ext.plan import Plan
from pyrl_ext.samples import Sample
from tests.helpers.deadline import DEADLINE
from tests.helpers.prompts import write_lines
from tests.helpers.rows import numbers
from tests.helpers.tiny import CONFIG, QUICK

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

DATA = CONFIG.parent / "data"
ROOT = CONFIG.parents[1]
GUESS = {"guesses": 4, "higher": "+", "lower": "-"}
SOURCES = ("copied", "game", "words")
EOS = 1


def judge(prompt: Any, text: str, tokens: list[int]) -> dict[str, float]:
    """1 for a lower-case letter, in worker processes; a third for another letter."""
    return {"letter": float(text.islower()), "case": text.isupper() / 3}


def write_config(folder: Path, environment: bool = True) -> Path:
    """A run with a game, a task and a reward function; without the environment number_match scores
    the game's prompts."""
    words = [{"prompt": f"{number}+", "answer": ""} for number in range(32)]
    game: dict[str, Any] = {"prompts": str(DATA / "guess.jsonl"), "weight": 2}
    game["eval_prompts"] = str(DATA / "guess_eval.jsonl")
    if environment:
        game |= {"environment": "guess", "environment_options": GUESS}
    else:
        game["reward"] = "number_match"
    lines = str(write_lines(folder / "words.jsonl", *words))
    copied = {
        "task": "copy",
        "task_options": {"length": 2, "alphabet": 6, "end": "", "held_out": 3},
    }
    sources = {
        "game": game,
        "copied": copied,
        "words": {"prompts": lines, "reward": f"{__name__}:judge"},
    }
    config = yaml.safe_load((CONFIG.parent / "tiny_turns.yaml").read_text())
    for key in ("config", "tokenizer"):
        config["model"][key] = str(CONFIG.parent / config["model"][key])
    config["data"] = {"max_prompt_tokens": 4, "sources": sources}
    config["evaluate"] = {"every": 2, "prompts": 16}
    del config["run"]
    if environment:
        config["turns"] |= {"environment": "sources", "options": {}}
    else:
        del config["turns"]
    path = folder / ("game.yaml" if environment else "alone.yaml")
    path.write_text(yaml.safe_dump(config))
    return path


def run(config: Path, folder: Path, *overrides: str) -> int:
    return train.main([str(config), f"run={folder}", "log.progress=false", *overrides])


def alone(source: str, prompt: Any, sample: Sample, decode: Any) -> float:
    """The reward of a trajectory, by what the source names, without a run."""
    spans = sample.spans or ((sample.prompt_len, sample.tokens.numel()),)
    texts: list[str] = []
    for begin, end in spans:
        sampled = sample.tokens[begin:end].tolist()
        texts.append(decode(sampled[:-1] if sampled[-1] == EOS else sampled))
    if source == "game":
        game = Guess(**GUESS)
        game.start(prompt)
        results = [game.step([], text) for text in texts]
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        observed = [sample.tokens[end:begin].tolist() for (_, end), (begin, _) in pairwise(spans)]
        assert [decode(each) for each in observed] == [r.observation for r in results[:-1]]
        return sum(result.reward for result in results)
    assert len(spans) == 1
    if source == "words":
        return sum(judge(prompt, texts[0], sample.response).values())
    return credit([*prompt.tokens, EOS], sample.response)


def check_rewards(folder: Path) -> None:
    """The recorded rewards, and the metrics by source, are what the sources give alone."""
    source = build_source(Plan.read(folder / "plan.json"))
    plan = Plan.read(folder / "plan.json")
    try:
        for row in [row for row in numbers(folder) if "reward" in row]:
            prompts = source.prompts.take(row["step"], plan.batching.prompts)
            by_id = {prompt.id: prompt for prompt in prompts}
            found: dict[str, list[float]] = {name: [] for name in SOURCES}
            file = folder / f"rollouts/step-{row['step']:06}.safetensors"
            for sample in load_samples(file):
                prompt = by_id[sample.prompt_id]
                expected = alone(prompt.source, prompt, sample, source.tokenizer.decode)
                assert sample.reward == pytest.approx(expected)
                found[prompt.source].append(expected)
            for name, rewards in found.items():
                assert row[f"source/{name}/reward"] == pytest.approx(mean(rewards))
    finally:
        source.close()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_sources_with_and_without_an_environment_are_rewarded_as_alone_and_learned(tmp_path: Path):
    config = write_config(tmp_path)
    folder = tmp_path / "run"
    sizes = ("batching.prompts=12", "evaluate.every=20", "steps=40")
    assert run(config, folder, *sizes, "rollout.record=rollouts") == 0
    check_rewards(folder)
    rows = [row for row in numbers(folder) if "reward" in row]
    for row in rows:
        assert row["turns/dropped"] == row["scoring/dropped"] == 0
        groups = {name: row[f"source/{name}/groups"] for name in SOURCES}
        rewards = sum(row[f"source/{name}/reward"] * count for name, count in groups.items())
        assert row["reward"] == pytest.approx(rewards / 12)
        assert row["reward/letter"] + row["reward/case"] == pytest.approx(
            row["source/words/reward"]
        )
        assert row["source/words/response_len"] == 1 and row["turns/max"] > 1
    for name in ("game", "words"):  # a response of one token earns little of copied
        rewards = [row[f"source/{name}/reward"] for row in rows]
        assert mean(rewards[-8:]) > mean(rewards[:8]) + 0.1, name
    evaluated = [row for row in numbers(folder) if "eval_reward" in row]
    for row in evaluated:  # of 16 held-out prompts eight are of the game
        shares = {"game": 8, "copied": 4, "words": 4}
        whole = sum(row[f"eval/{name}/reward"] * count for name, count in shares.items())
        assert row["eval_reward"] == pytest.approx(whole / 16)
    for name in ("game", "words"):
        assert evaluated[-1][f"eval/{name}/reward"] > evaluated[0][f"eval/{name}/reward"]


def test_a_resumed_run_of_environments_and_rewards_has_the_rows_of_a_whole_one(tmp_path: Path):
    config = write_config(tmp_path)
    common = (*QUICK[:2], "checkpoint.every=1", "objective.dynamic_sampling=2")
    sets = f"evaluate.sets={{sums: {{file: {DATA / 'arithmetic.jsonl'}, reward: number_match}}}}"
    common = (*common, sets, "data.max_prompt_tokens=40", "turns.max_tokens=64")
    assert run(config, tmp_path / "whole", "steps=4", *common) == 0
    assert run(config, tmp_path / "parts", "steps=1", *common) == 0
    assert run(config, tmp_path / "parts", "steps=4", *common) == 0
    measured = ("turns/environment_seconds", "turns/waited_seconds")
    rows = numbers(tmp_path / "whole", *measured)
    assert rows == numbers(tmp_path / "parts", *measured)
    evaluated = [row for row in rows if "eval_reward" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4]
    assert all(row["eval/sums/response_len"] == 1 for row in evaluated)


def test_a_source_without_an_environment_has_the_samples_of_a_run_without_environments(
    tmp_path: Path,
):
    samples: dict[bool, dict[tuple[int, int], Sample]] = {}
    for environment in (True, False):
        config = write_config(tmp_path, environment)
        folder = tmp_path / str(environment)
        options = ("steps=1", "evaluate.every=0", "rollout.record=rollouts")
        assert run(config, folder, *QUICK[:2], *options) == 0
        found = load_samples(folder / "rollouts/step-000000.safetensors")
        samples[environment] = {(s.prompt_id, s.index): s for s in found}
    assert samples[True].keys() == samples[False].keys()
    source = build_source(Plan.read(tmp_path / "True/plan.json"))
    with_reward = [p.id for p in source.prompts.take(0, 4) if p.source != "game"]
    source.close()
    assert len(with_reward) == 2
    for key, sample in samples[True].items():
        if key[0] in with_reward:
            other = samples[False][key]
            assert torch.equal(sample.tokens, other.tokens)
            assert torch.equal(sample.rollout_logprobs, other.rollout_logprobs)
            assert (sample.reward, sample.components) == (other.reward, other.components)
            assert sample.finish_reason == other.finish_reason


def test_two_ranks_have_the_rewards_of_one(tmp_path: Path):
    """Compare the first step, whose samples do not depend on rounding."""
    config = write_config(tmp_path)
    common = [*QUICK[:2], "steps=1", "evaluate.every=0", "rollout.record=rollouts"]
    assert run(config, tmp_path / "one", *common) == 0
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    target = ["-m", "pyrl_ext.train", str(config), f"run={tmp_path / 'two'}"]
    command = [sys.executable, *launch, *target, *common]
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE)
    assert Plan.read(tmp_path / "two/plan.json").parallel.dp == 2
    [one], [two] = (numbers(tmp_path / name) for name in ("one", "two"))
    for name in SOURCES:
        for metric in ("reward", "solved", "response_len", "groups"):
            key = f"source/{name}/{metric}"
            assert two[key] == pytest.approx(one[key])
    assert two["turns/mean"] == one["turns/mean"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
