"""Dynamic sampling: which groups are kept, by brute force; runs that stop, spread and play back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyrl_ext import train
from pyrl_ext.data.prompts import PromptSource
from pyrl_ext.data.recordings import load_samples
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.parallel.collective_errors import AgreedError
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.rollout.dynamic_sampling import fill, stream_step
from pyrl_ext.samples import Prompt, Sample
from tests.helpers.engines import random_sample
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import numbers
from tests.helpers.scores import check_scores
from tests.helpers.tiny import CONFIG, QUICK, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def group_of(prompt: int, rewards: list[float]) -> list[Sample]:
    return [
        replace(random_sample(prompt, i, 5 + (prompt + i) % 3), reward=reward)
        for i, reward in enumerate(rewards)
    ]


class Stream:
    """Groups of three with rewards of 0 and 1, equal ones with probability ``flat``."""

    def __init__(self, flat: float, seed: int):
        rng = np.random.default_rng(seed)
        self.groups: list[list[Sample]] = []
        for prompt in range(200):
            mixed = rng.permutation([0.0, 0.01, float(rng.integers(2))]).tolist()
            equal = [float(rng.integers(2))] * 3
            self.groups.append(group_of(prompt, equal if rng.random() < flat else mixed))
        self.asked: list[int] = []
        self.found: list[int] = []

    def ask(self, number: int, asked: int, found: int) -> RolloutSamples:
        assert number == len(self.asked)
        first = sum(self.asked)
        self.asked.append(asked)
        self.found.append(found)
        samples = [s for group in self.groups[first : first + asked] for s in group]
        return RolloutSamples(BatchIndex.of(samples), samples)


def varied(groups: list[list[Sample]]) -> list[int]:
    return [g[0].prompt_id for g in groups if any(s.reward != g[0].reward for s in g)]


@pytest.mark.parametrize("flat", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("keep", [1, 5, 8])
def test_fill_keeps_the_first_groups_with_unequal_rewards(flat: float, keep: int):
    refilled = 0
    for seed in range(6):
        stream = Stream(flat, seed)
        got, metrics = fill(stream.ask, keep, 20, "fail", hold=seed % 2 == 0)
        drawn = stream.groups[: sum(stream.asked)]
        wanted = varied(stream.groups)[:keep]
        assert [*dict.fromkeys(got.index.groups.tolist())] == wanted
        assert [s.prompt_id for s in got.samples] == [g for g in wanted for _ in range(3)]
        assert got.index.rewards.tolist() == [s.reward for s in got.samples]
        lost = [s for g in drawn for s in g if s.prompt_id not in wanted]
        assert [(s.prompt_id, s.index) for s in got.dropped] == (
            [(s.prompt_id, s.index) for s in lost] if seed % 2 == 0 else []
        )
        for number in range(1, len(stream.asked)):  # a round begins where groups are missing
            known = varied(stream.groups[: sum(stream.asked[:number])])
            assert len(known) < keep and stream.found[number] == len(known)
            assert 1 <= stream.asked[number] <= keep
        assert metrics == {
            "rollout/flat_groups": (len(drawn) - len(varied(drawn))) / len(drawn),
            "rollout/flat_groups_kept": 0,
            "rollout/refills": len(stream.asked) - 1,
            "rollout/dropped_groups": len(drawn) - keep,
            "rollout/dropped_tokens": sum(len(s.tokens) - s.prompt_len for s in lost),
            "rollout/reward_all": pytest.approx(np.mean([s.reward for g in drawn for s in g])),
        }
        refilled += metrics["rollout/refills"] > 0
    assert (refilled > 0) == (flat > 0)


def test_fill_asks_for_as_many_prompts_as_the_share_of_kept_ones_lets_expect():
    stream = Stream(0.0, 0)
    for i in (0, 1, 2, 5, 6, 8, 9, 10, 11):
        stream.groups[i] = group_of(i, [1.0] * 3)
    fill(stream.ask, 8, 3, "fail")
    assert stream.asked == [8, 8, 3]  # 3 of 8 kept: 5 * 8 / 3, at most 8; 7 of 16: 1 * 16 / 7


@pytest.mark.parametrize("hold", [True, False])
def test_fill_ends_the_run_or_keeps_flat_groups_where_refills_do_not_suffice(hold: bool):
    stream = Stream(1.0, 0)
    for i in (2, 9):
        stream.groups[i] = group_of(i, [1.0, 0.0, 0.0])
    text = "2 groups with unequal rewards and 10 with equal ones after 2 refills, expected 4 with"
    with pytest.raises(AgreedError, match=text):
        fill(stream.ask, 4, 2, "fail", hold)
    stream.asked.clear()
    got, metrics = fill(stream.ask, 4, 2, "keep_flat", hold)
    assert [*dict.fromkeys(got.index.groups.tolist())] == [0, 1, 2, 9]  # in the stream's order
    assert len(got.samples) == 12 and len(got.dropped) == (24 if hold else 0)
    assert metrics["rollout/refills"] == 2 and metrics["rollout/dropped_groups"] == 8
    assert metrics["rollout/flat_groups_kept"] == 2


def test_fill_needs_the_share_of_responses_of_all_rounds_together():
    """The first round and the third lose all their responses."""
    stream = Stream(0.0, 0)
    for i in (0, 1, 2, 3, 8, 9, 10, 11):
        stream.groups[i] = []
    for i in (4, 5):
        stream.groups[i] = group_of(i, [1.0] * 3)

    def ask(number: int, asked: int, found: int) -> RolloutSamples:
        drawn = stream.ask(number, asked, found)
        drawn.counts["responses"] += 3 * asked
        drawn.counts["dropped/timeout"] += 3 * asked - len(drawn.index)
        drawn.counts["max_reward_busy"] = 2.0
        drawn.counts["max_turns"] = number
        return drawn

    got, metrics = fill(ask, 4, 3, "fail", min_share=0.5)
    assert stream.asked == [4, 4, 4, 4]
    assert [*dict.fromkeys(got.index.groups.tolist())] == [6, 7, 12, 13]
    assert metrics["rollout/refills"] == 3 and len(got.samples) == 12
    assert got.counts["responses"] == 48 and got.counts["dropped/timeout"] == 24
    assert got.counts["max_reward_busy"] == 8.0 and got.counts["max_turns"] == 3
    stream.asked.clear()
    text = "24 of 48 responses have a reward, expected at least data.reward_min_share 0.6"
    with pytest.raises(AgreedError, match=text):
        fill(ask, 4, 3, "fail", min_share=0.6)


def test_stream_step_gives_every_round_prompts_of_its_own():
    source = PromptSource([Prompt(i, (i,)) for i in range(50)], seed=3)
    ids = [
        prompt.id
        for step in range(40)
        for number in range(4)
        for prompt in source.take(stream_step(step, number, 3), 6)
    ]
    assert len(set(ids)) == len(ids)
    assert stream_step(7, 0, 3) == 7  # the prompts of a run without refills


# whole runs --------------------------------------------------------------------------------------

COMMON = ("objective.dynamic_sampling=8", "batching.samples_per_prompt=2")
RECORD = (*COMMON, "evaluate.every=2", "checkpoint.every=1", "rollout.record=rollouts")


def start(folder: Path, *overrides: str) -> int:
    quick = [o for o in QUICK if o.split("=")[0] not in {o.split("=")[0] for o in overrides}]
    return train.main([str(CONFIG), f"run={folder}", *quick, *overrides])


def run(folder: Path, *overrides: str) -> None:
    assert start(folder, *overrides) == 0


def on_rank(_group: object, folder: Path, *overrides: str) -> None:
    run(folder, *overrides)


def recorded(folder: Path, step: int) -> dict[tuple[int, int], list[int]]:
    """(prompt, sample) -> tokens, of all groups that a step generated."""
    files = sorted((folder / "rollouts").glob(f"step-{step:06d}*.safetensors"))
    samples = [sample for file in files for sample in load_samples(file)]
    assert len({(s.prompt_id, s.index) for s in samples}) == len(samples)
    return {(s.prompt_id, s.index): s.tokens.tolist() for s in samples}


def test_train_with_refills_stops_resumes_spreads_and_plays_back_the_same(tmp_path: Path):
    run(tmp_path / "whole", "steps=3", *RECORD)
    rows = numbers(tmp_path / "whole")
    assert sum(row.get("rollout/refills", 0) for row in rows) >= 2
    run(tmp_path / "parts", "steps=1", *RECORD)
    run(tmp_path / "parts", "steps=3", *RECORD)
    assert numbers(tmp_path / "parts") == rows
    for step in range(3):
        of_whole = recorded(tmp_path / "whole", step)
        assert recorded(tmp_path / "parts", step) == of_whole
        trained = tiny_plan(*QUICK).batching.prompts
        assert len(of_whole) == 2 * (trained + rows[step]["rollout/dropped_groups"])
    run_ranks(on_rank, 2, tmp_path / "two", "steps=2", "parallel.dp=2", *RECORD)
    two = numbers(tmp_path / "two")
    assert recorded(tmp_path / "two", 0) == recorded(tmp_path / "whole", 0)
    for name in ("reward", "rollout/refills", "rollout/dropped_tokens", "rollout/flat_groups"):
        assert two[0][name] == rows[0][name], name
    assert two[0]["loss"] == pytest.approx(rows[0]["loss"], abs=1e-6)
    left_out = 2 * int(two[1]["rollout/dropped_groups"])
    check_scores(tmp_path / "two/rollouts", 1, two[1]["mismatch/abs_mean"], left_out)
    played = f"rollout.path={tmp_path / 'whole/rollouts'}"
    run(
        tmp_path / "again",
        "steps=3",
        *COMMON,
        "rollout.engine=recorded",
        played,
        "evaluate.every=0",
    )
    for one, again in zip(rows, numbers(tmp_path / "again"), strict=False):
        for name in ("reward", "loss", "grad_norm", "rollout/refills", "rollout/dropped_tokens"):
            assert again[name] == one[name], name


EASY = (
    "objective=dapo",
    "objective.dynamic_sampling=2",
    "data.task=null",
    "data.task_options={}",
    "data.prompts=data/arithmetic.jsonl",
    f"data.reward={__name__}:easy",
    "evaluate.every=0",
    "steps=3",
)


def easy(prompt: object, text: str, tokens: list[int]) -> float:
    """Rewards of the first step differ; later all prompts are solved."""
    rows = Path(os.environ["EASY_RUN"], "metrics.jsonl").read_text()
    return 1.0 if rows else float(len(text))


def test_train_keeps_flat_groups_of_an_easy_set_unless_a_shortage_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EASY_RUN", str(tmp_path / "kept"))
    assert start(tmp_path / "kept", *EASY) == 0
    rows = numbers(tmp_path / "kept")
    assert [row["rollout/flat_groups_kept"] for row in rows] == [0, 4, 4]
    shown = capsys.readouterr().out
    line = "0 of 4 groups have unequal rewards after 2 refills; 4 with equal ones are kept\n"
    assert "step 0: " not in shown
    assert f"step 1: {line}" in shown
    assert f"step 2: {line}" in shown

    monkeypatch.setenv("EASY_RUN", str(tmp_path / "failed"))
    assert start(tmp_path / "failed", *EASY, "objective.dynamic_sampling_shortage=fail") == 1
    error = capsys.readouterr().err
    assert "0 groups with unequal rewards and 12 with equal ones after 2 refills" in error
    assert "the weights after step 1 are kept: the same command resumes from" in error
    assert start(tmp_path / "failed", *EASY) == 0  # the option may change
    assert numbers(tmp_path / "failed") == rows
