"""Conversations with a scripted engine: token ids from start to end, budgets, forks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pyrl_ext.data.environment import Context
from pyrl_ext.rollout.turns.turn_queue import Feed, converse
from pyrl_ext.samples import Prompt, Sample, Sampling
from tests.helpers.conversations import (
    EOS,
    TOKENIZER,
    carrying,
    config,
    hold,
    reason,
    three_then_stop,
    trained,
)
from tests.helpers.environments import Counting, Delayed, Echoing, Forking, told
from tests.helpers.scripted import ScriptedEngine


def rows(prompt: int, index: int, turns: int, observation: str = " {} ") -> list[Any]:
    """(token, sampled or not) of a trajectory, by a loop over turns."""
    known = [(t, False) for t in (30 + prompt % 5, 40)]
    for number in range(1, turns + 1):
        new: list[int] = []
        while len(new) < 4 and EOS not in new:
            new.append(three_then_stop(prompt, index, len(known) + len(new)))
        known += [(t, True) for t in new]
        if number < turns:
            text = observation.format(number)
            known += [(t, False) for t in TOKENIZER(text, add_special_tokens=False)["input_ids"]]
    return known


def test_converse_keeps_what_was_sampled_and_appends_observations_as_tokens():
    found, feed = hold(Counting, prompts=3, size=2)
    assert len(found) == 6
    for (prompt, index), conversation in found.items():
        (sample,) = trained(conversation)
        expected = rows(prompt, index, 3)
        assert sample.tokens.tolist() == [token for token, _ in expected]
        assert sample.loss_mask.tolist() == [sampled for _, sampled in expected]
        logprobs = torch.tensor([(-0.5 - t / 100) * s for t, s in expected])
        assert torch.allclose(sample.rollout_logprobs, logprobs)
        assert (sample.prompt_len, sample.turn, sample.last) == (2, 0, True)
        assert sample.reward == 0.25 + 0.5 + 0.75
        assert sample.finish_reason == "stop"
    assert feed.counts["turns"] == 18 and feed.counts["max_turns"] == 3


def test_converse_tells_the_tokens_of_a_turn_and_the_text_before_the_stop_token():
    found, _ = hold(Echoing, prompts=3, size=2)
    for conversation in found.values():
        (sample,) = trained(conversation)
        turns = [turn.response for turn in conversation.turns]
        texts = [TOKENIZER.decode(t[:-1] if t[-1] == EOS else t) for t in turns]
        assert sample.reward == sum(map(told, turns, texts))


@pytest.mark.parametrize("form", ["concatenated", "stepwise"])
def test_converse_asks_for_whole_contexts(form: str):
    engine = ScriptedEngine(three_then_stop)
    hold(Counting, engine, prompts=1, size=1, form=form, merge=False)
    whole = [token for token, _ in rows(0, 0, 3)]
    assert [turn.number for turn in engine.turns] == [0, 1, 2]
    for turn in engine.turns:
        assert list(turn.prompt.tokens) == whole[: len(turn.prompt.tokens)]


def test_converse_makes_a_sample_a_turn_without_merging():
    together, _ = hold(Counting, prompts=2, size=1)
    apart, _ = hold(Counting, prompts=2, size=1, form="stepwise", merge=False)
    merged, _ = hold(Counting, prompts=2, size=1, form="stepwise")
    for key in together:
        (whole,), parts = trained(together[key]), trained(apart[key])
        assert [(s.turn, s.last, len(s.spans)) for s in parts] == [
            (0, False, 1),
            (1, False, 1),
            (2, True, 1),
        ]
        assert same([whole], trained(merged[key]))
        mask = torch.zeros_like(whole.loss_mask)
        for part in parts:
            size = part.tokens.numel()
            assert torch.equal(part.tokens, whole.tokens[:size])
            assert not (mask[:size] & part.loss_mask).any()
            mask[:size] |= part.loss_mask
            assert part.reward == whole.reward and part.finish_reason == whole.finish_reason
        assert torch.equal(mask, whole.loss_mask)
        assert whole.spans == tuple(part.spans[0] for part in parts)


def test_converse_counts_forks_and_begins_a_sample_at_each():
    found, feed = hold(Forking, prompts=1, size=1, form="stepwise")
    first, second = trained(found[0, 0])
    assert (first.turn, len(first.spans), first.last) == (0, 1, False)
    assert (second.turn, len(second.spans), second.last) == (1, 2, True)
    assert second.tokens[:3].tolist() == [9, 9, 9] and second.prompt_len == 3
    assert feed.counts["forks"] == 1
    dropped, feed = hold(Forking, prompts=1, size=1)
    assert reason(dropped[0, 0]) == "fork"
    assert feed.counts["forks"] == 0 and feed.counts["dropped/fork"] == 1


@pytest.mark.parametrize(
    ("begin", "context"), [("ab", [30, 40, 74, 75]), ([5, 6], [30, 40, 5, 6]), (Context((7,)), [7])]
)
def test_converse_takes_the_first_observation_into_the_prompt(begin: Any, context: list[int]):
    found, _ = hold(partial(Counting, 1, begin=begin), prompts=1, size=1)
    (sample,) = trained(found[0, 0])
    assert sample.tokens[: sample.prompt_len].tolist() == context


@pytest.mark.parametrize("in_waves", [False, True])
def test_a_prompt_of_a_source_without_an_environment_has_one_response(in_waves: bool):
    """Next to one with an environment; what a response ends with stays."""
    prompts = [Prompt(0, (30, 40), source="words"), carrying(Prompt(1, (31, 40)), Counting)]
    engine = ScriptedEngine(three_then_stop)
    feed = Feed(prompts, 2, config(in_waves))
    sampling = Sampling(max_new_tokens=4, stop_ids=(EOS,), samples_per_prompt=2)
    over = [each for _, some in converse(engine, feed, sampling) for each in some]
    assert len(over) == 4
    for conversation in over:
        (sample,) = trained(conversation)
        one = conversation.prompt.id == 0
        turns = 1 if one else 3
        expected = rows(conversation.prompt.id, conversation.index, turns)
        assert sample.tokens.tolist() == [token for token, _ in expected]
        assert sample.loss_mask.tolist() == [sampled for _, sampled in expected]
        assert conversation.number_of_turns == turns
    assert feed.counts["begun"] == 4 and feed.counts["turns"] == 2 * (1 + 3)
    short = Feed(prompts[:1], 1, replace(config(in_waves), max_new_tokens=1))
    [conversation] = [each for _, some in converse(engine, short, sampling) for each in some]
    (sample,) = trained(conversation)
    assert len(sample.response) == 1 and sample.finish_reason == "length"


@pytest.mark.parametrize("room", (6, 7, 9, 10, 13, 15, 16, 17, 20, 25))
def test_converse_ends_a_trajectory_whose_context_is_full(room: int):
    """Each turn has 4 tokens or fewer, each observation 3; the prompt 2."""
    found, _ = hold(Counting, prompts=1, size=1, max_tokens=room)
    conversation = found[0, 0]
    (sample,) = trained(conversation)
    whole = [token for token, _ in rows(0, 0, 3)]
    assert sample.tokens.tolist() == whole[: sample.tokens.numel()]
    assert sample.tokens.numel() <= room
    full = sample.tokens.numel() < len(whole)
    assert sample.finish_reason == ("length" if full else "stop")
    assert sample.reward == sum(n / 4 for n in range(1, len(conversation.turns) + 1))
    if full:  # another turn would not have had a token
        assert conversation.turns[-1].response[-1] != EOS or sample.tokens.numel() + 3 >= room


def test_converse_fills_the_last_row_of_a_turn_from_the_next_and_counts_changed_rows():
    plain, _ = hold(Counting, prompts=1, size=1)
    (sample,) = trained(plain[0, 0])
    assert sample.route_mask.tolist() == [True] * (sample.tokens.numel() - 1) + [False]
    for policy in ("first", "last"):
        engine = ScriptedEngine(three_then_stop, rerouted=[(1, 0), (1, 1), (2, 1)])
        found, feed = hold(Counting, engine, prompts=1, size=1, routes=policy)
        (changed,) = trained(found[0, 0])
        # turn 1 reports rows 0 and 1 in another way; turn 2 row 1 as turn 1, and row 0 as turn 0
        assert feed.counts["changed_rows"] == 3
        assert changed.routes is not None and sample.routes is not None
        assert torch.equal(changed.routes, sample.routes) == (policy == "first")
        differs = (changed.routes != sample.routes).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert differs == ([] if policy == "first" else [1])


def test_converse_masks_rows_that_no_turn_reports_and_fills_those_that_another_does():
    engine = ScriptedEngine(three_then_stop, unrouted=[(0, 1), (1, 1), (2, 1), (2, 2)])
    found, _ = hold(Counting, engine, prompts=1, size=1)
    (sample,) = trained(found[0, 0])
    assert (~sample.route_mask).nonzero()[:, 0].tolist() == [1, sample.tokens.numel() - 1]


def test_converse_joins_the_sets_that_turns_were_drawn_from():
    found, _ = hold(Counting, prompts=1, size=1, sampling_mask=True)
    (sample,) = trained(found[0, 0])
    assert sample.kept_counts is not None and sample.kept_ids is not None
    counts = []
    ids = []
    for place, (token, drawn) in enumerate(rows(0, 0, 3)):
        some = [token, token + 1][: 2 - place % 2] if drawn else []
        counts.append(len(some) or -1)
        ids += some
    assert (sample.kept_counts.tolist(), sample.kept_ids.tolist()) == (counts, ids)


@pytest.mark.parametrize("together", [1, 3, 100])
def test_converse_does_not_depend_on_what_runs_together(together: int):
    one, _ = hold(Counting, prompts=5, size=3)
    other, _ = hold(Counting, ScriptedEngine(three_then_stop, together), 5, 3)
    assert one.keys() == other.keys()
    assert all(same(trained(one[k]), trained(other[k])) for k in one)


def slowly(prompt: int, index: int, place: int) -> int:
    time.sleep(0.01)
    return three_then_stop(prompt, index, place)


@pytest.mark.parametrize(
    ("environment", "script"), [(Delayed, three_then_stop), (Counting, slowly)]
)
def test_converse_in_waves_begins_turns_in_an_order_that_time_does_not_change(
    environment: Any, script: Any
):
    """Every trajectory has its turn before any has the next one: with slow environments, and with
    an engine that is slower than they are."""
    engine = ScriptedEngine(script, together=3)
    conversations, _ = hold(environment, engine, prompts=4, size=2, in_waves=True)
    assert all(len(trained(each)) == 1 for each in conversations.values())
    order = [(turn.number, turn.prompt.id, turn.index) for turn in engine.turns]
    assert order == sorted(order) and len(order) == 4 * 2 * 3


def same(one: Sequence[Sample], other: Sequence[Sample]) -> bool:
    names = Sample.__dataclass_fields__

    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return len(one) == len(other) and all(
        equal(getattr(a, n), getattr(b, n)) for a, b in zip(one, other) for n in names
    )
