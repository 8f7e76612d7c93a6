"""Trajectories of several turns in the embedded engine, against engines that see whole contexts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pyrl_ext.rollout.hf import run
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.samples import Prompt, Sample, Sampling, Turn
from tests.helpers.configs import CONFIGS as FOLDERS
from tests.helpers.engines import (
    CONFIGS,
    GLM,
    assert_matches_plain,
    checkpoint,
    engine_of,
    prompts_of,
    random_model,
)
from tests.helpers.turns import ScriptedFeed, afresh, answers, by_turn, first_turns, ragged

pytestmark = pytest.mark.multiprocess

SAMPLING = Sampling(6, 1.3, stop_ids=(*range(20, 28),), seed=5)


@contextmanager
def computed(engine: HFEngine) -> Iterator[list[tuple[int, int]]]:
    """(rows, tokens a row) of every forward that the model runs."""
    shapes: list[tuple[int, int]] = []

    def see(_: Any, args: Any, given: dict[str, Any]) -> None:
        shapes.append(tuple(given["input_ids"].shape))

    hook = engine.model.register_forward_pre_hook(see, with_kwargs=True)
    yield shapes
    hook.remove()


def equal(got: Sample, expected: Sample) -> None:
    assert got.response == expected.response
    assert got.prompt_len == expected.prompt_len
    assert got.finish_reason == expected.finish_reason
    torch.testing.assert_close(
        got.rollout_logprobs, expected.rollout_logprobs, atol=2e-5, rtol=0, msg=str
    )


@pytest.mark.parametrize("slots", [128, 7], ids=["roomy", "crowded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_answer_equals_whole_forwards_of_every_context(family: str, slots: int):
    """Four turns of twelve trajectories, some of which fork."""
    config = CONFIGS[family]
    model = random_model(config)
    engine = engine_of(model, config, max_num_seqs=slots)
    prompts = prompts_of([1, 7, 3, 12], config["vocab_size"])
    script = ragged(4, config["vocab_size"], fork=True)
    feed = ScriptedFeed(first_turns(prompts, 3, 6), script, late=slots == 7)
    samples = by_turn(answers(engine, feed, SAMPLING))
    assert [*samples] == [(p.id, i, t) for p in prompts for i in range(3) for t in range(4)]
    assert {s.finish_reason for s in samples.values()} == {"stop", "length"}
    for sample in samples.values():
        assert sample.check().weight_version == 3
        assert_matches_plain(model, sample, SAMPLING)
    fresh = engine_of(model, config)
    for (_, index, turn), sample in samples.items():
        if index == turn % 3:
            equal(sample, afresh(fresh, sample, SAMPLING))


@pytest.mark.parametrize("slots", [8, 2])
def test_answer_does_not_depend_on_other_turns(slots: int, monkeypatch: pytest.MonkeyPatch):
    """Nor on when observations come: at once, or late, some rows waiting for a thread."""
    model = random_model(GLM)
    prompts = prompts_of([4, 6, 2], 128)
    script = ragged(3, 128)
    at_once = engine_of(model, GLM)
    expected = by_turn(answers(at_once, ScriptedFeed(first_turns(prompts, 2, 6), script), SAMPLING))
    engine = engine_of(model, GLM, max_num_seqs=slots)
    monkeypatch.setattr(run, "MAX_PREFILL_TOKENS", 24)
    feed = ScriptedFeed(first_turns(prompts, 2, 6), script, delay=0.02)
    found = by_turn(answers(engine, feed, SAMPLING))
    assert feed.waits > 1 and [*found] == [*expected]
    for key, sample in found.items():
        equal(sample, expected[key])


def test_answer_prefills_equal_contexts_once_in_any_order():
    model = random_model(GLM)
    engine = engine_of(model, GLM)
    prompts = prompts_of([4, 7], 128)
    turns = first_turns(prompts, 2, 3)
    feed = ScriptedFeed(turns[::2] + turns[1::2], lambda sample: None)
    with computed(engine) as shapes:
        samples = list(answers(engine, feed, Sampling(3)))
    assert shapes[0] == (2, 7) and len(samples) == 4
    for sample in samples:
        assert sample.tokens[: sample.prompt_len].tolist() == list(
            prompts[sample.prompt_id == prompts[1].id].tokens
        )
        assert_matches_plain(model, sample.check(), Sampling(3))


def test_answer_fills_a_row_to_its_last_place():
    """One context leaves room for its turn alone, next to one whose observation is longer."""
    model = random_model(GLM)
    engine = engine_of(model, GLM)

    def script(sample: Sample) -> Any:
        seen = [5] * (9 if sample.prompt_id == 10 else 1)
        return None if sample.turn else sample.tokens.tolist() + seen

    prompts = prompts_of([2, 20], 128)  # 20 + 4 + 1 + 4 tokens at the end
    feed = ScriptedFeed(first_turns(prompts, 2, 4), script, max_tokens=29)
    for sample in answers(engine, feed, Sampling(4)):
        assert_matches_plain(model, sample.check(), Sampling(4))


def test_answer_looks_for_stop_strings_in_the_turns_own_response():
    """Observations hold the stop strings whole, and end with their beginnings."""
    from pyrl_ext.data.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(FOLDERS / "tiny")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    stop = ("7 ", "41", "1")
    model = random_model(GLM, std=0.05)
    engine = engine_of(model, GLM, tokenizer=tokenizer)
    seen = encode("141 7 4") + encode("7")

    def script(sample: Sample) -> Any:
        return None if sample.turn == 2 else sample.tokens.tolist() + seen

    sampling = Sampling(24, samples_per_prompt=4, seed=1, stop=stop)
    feed = ScriptedFeed(first_turns(prompts_of([3, 9, 5], 128), 4, 24), script)
    ends = []
    for sample in answers(engine, feed, sampling):
        texts = [tokenizer.decode(sample.response[:n]) for n in range(1, 25)]
        hits = [n for n, text in enumerate(texts, 1) if any(s in text for s in stop)]
        first = min(hits, default=24)
        assert len(sample.response) == first
        assert sample.finish_reason == ("stop" if hits and hits[0] == first else "length")
        ends.append((sample.turn, first))
    assert {turn for turn, end in ends if 1 < end < 24} == {0, 1, 2}


# weights that change -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 4])
def test_answer_fails_when_its_weights_are_replaced(version: int):
    """Also by others under the same version, while nothing runs."""
    engine = engine_of(random_model(GLM), GLM)
    feed = ScriptedFeed(first_turns(prompts_of([5], 128), 1, 6), ragged(3, 128))
    stream = engine.answer(feed, SAMPLING)
    feed.reply(next(stream))
    engine.load_weights(checkpoint(random_model(GLM, seed=1)).items(), version)
    with pytest.raises(RuntimeError, match=r"HFEngine\.answer: version 3 .* was replaced"):
        next(stream)


# ends and refusals -------------------------------------------------------------------------------


def test_answer_that_is_closed_runs_no_further_forward():
    engine = engine_of(random_model(GLM), GLM, max_num_seqs=4)
    first = first_turns(prompts_of([5, 8], 128), 3, 6)
    whole = by_turn(answers(engine, ScriptedFeed(first, ragged(3, 128)), SAMPLING))
    with computed(engine) as shapes:
        some = [
            s
            for s, _ in zip(answers(engine, ScriptedFeed(first, ragged(3, 128)), SAMPLING), "abcd")
        ]
        count = len(shapes)
        assert len(some) == 4 and count
    again = by_turn(answers(engine, ScriptedFeed(first, ragged(3, 128)), SAMPLING))
    for key, sample in again.items():
        equal(sample, whole[key])


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([Turn(Prompt(4, ()), 1, 2, 3)], r"answer\(turn 2 of sample 1 of prompt 4\): 0 tokens"),
        ([Turn(Prompt(4, (5, 128)), 0, 0, 3)], r"prompt 4\): token id 128, expected 0 to 127"),
        ([Turn(Prompt(4, (5,) * 30), 0, 0, 3)], r"expected at most 32 tokens of the feed in all"),
        ([Turn(Prompt(4, (5,) * 510), 0, 0, 3)], "expected at most 512 positions in all"),
    ],
)
def test_answer_refuses_bad_turns(turns: list[Turn], message: str):
    feed = ScriptedFeed(turns, lambda _: None, max_tokens=32)
    with pytest.raises(ValueError, match=message):
        next(engine_of(random_model(GLM), GLM).answer(feed, SAMPLING))


def test_answer_of_no_turns_ends():
    engine = engine_of(random_model(GLM), GLM)
    assert engine.capabilities.turns
    assert [*engine.answer(ScriptedFeed([], lambda _: None, trajectories=1), SAMPLING)] == []
    with pytest.raises(RuntimeError, match="no weights were loaded yet"):
        next(HFEngine(GLM).answer(ScriptedFeed([], lambda _: None), SAMPLING))
