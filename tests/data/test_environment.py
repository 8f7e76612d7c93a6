"""Environments are loaded and what they return is checked, with messages that name the rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pyrl_ext.data.environment import (
    Context,
    EnvironmentHost,
    StepResult,
    load_environment,
    read_observation,
    read_step,
)
from pyrl_ext.data.workers import CallFailed
from pyrl_ext.plan.schema.turns import REASONS, NamedEnvironment
from pyrl_ext.rollout.turns.conversation import Conversation
from pyrl_ext.samples import Prompt
from tests.helpers.conversations import TOKENIZER, config

STEP = "expected StepResult(observation, reward, done) or a tuple of 3 or 4 like it"


@pytest.mark.parametrize(
    "value",
    [
        ("a", 1, False),
        ("a", np.float32(1), np.False_),
        ("a", 1.0, False, {}),
        StepResult("a", 1, False),
    ],
)
def test_read_step_takes_step_results_and_tuples(value: Any):
    assert read_step(value)[:3] == ("a", 1.0, False)


def test_read_step_fills_what_a_step_result_leaves_out():
    assert read_step(StepResult("a")) == StepResult("a", 0.0, False, None)


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        (None, "result", f"returned None, {STEP}"),
        (["a", 1.0, True], "result", f"returned ['a', 1.0, True], {STEP}"),
        (("a", 1.0), "result", f"returned ('a', 1.0), {STEP}"),
        (("a", 1.0, True, {}, 0), "result", f"returned ('a', 1.0, True, {{}}, 0), {STEP}"),
        (("a", float("nan"), True), "reward", "returned the reward nan, expected a finite number"),
        (("a", 10**400, True), "reward", "whose repr raised|expected a finite number"),
        (("a", "1", True), "reward", "returned the reward '1', expected a finite number"),
        (("a", 1.0, "yes"), "result", "returned done 'yes', expected True or False"),
    ],
)
def test_read_step_refuses_with_a_reason(value: Any, reason: str, message: str):
    with pytest.raises(CallFailed) as caught:
        read_step(value)
    assert caught.value.reason == reason and reason in REASONS
    assert any(part in str(caught.value) for part in message.split("|"))


class Endless(Sequence[int]):
    """A sequence whose length is 1 and whose iteration never ends."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        return 7


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (
            range(10**9),
            f"returned an observation of 1000000000 token ids, expected at most {2**22}",
        ),
        (Endless(), "expected text, a sequence of token ids, or Context(tokens)"),
    ],
)
def test_read_observation_reads_no_more_than_a_context_may_have(observation: Any, message: str):
    for value in (observation, Context(observation)):
        with pytest.raises(CallFailed, match=re.escape(message)):
            read_observation(value)


def appended(observation: Any) -> list[int]:
    """The tokens of a first observation."""
    conversation = Conversation(Prompt(0, (9,)), 0, config())
    return list(conversation.started(read_observation(observation)).prompt.tokens[1:])


@pytest.mark.parametrize(
    ("observation", "tokens"),
    [("a1", [74, 26]), ([5, 6], [5, 6]), ((5,), [5]), (np.array([5, 6]), [5, 6])],
)
def test_started_takes_text_and_ids(observation: Any, tokens: list[int]):
    assert appended(observation) == tokens


@pytest.mark.parametrize(
    ("observation", "reason", "message"),
    [
        ("", "empty", "returned the observation '', expected at least one token"),
        ([], "empty", "returned the observation [], expected at least one token"),
        (b"a", "result", "returned the observation b'a', expected text"),
        ({"a": 1}, "result", "returned the observation {'a': 1}, expected text"),
        (["a"], "result", "returned the observation ['a'], expected text"),
        ([True], "result", "returned the observation [True], expected text"),
        ([128], "tokens", "returned the token id 128, expected 0 to 127, the model's"),
        ([-1], "tokens", "returned the token id -1, expected 0 to 127"),
        ("\N{SNOWMAN}", "tokens", "(U+2603)"),
        ("\ud800", "tokens", "expected"),
        ("aaaaaaaaa", "observation", "an observation of 9 tokens, expected at most turns.max_obs"),
        ("a" * 1_000_000, "observation", "1,000,000 characters"),
    ],
)
def test_started_refuses_with_a_reason(observation: Any, reason: str, message: str):
    with pytest.raises(CallFailed, match=re.escape(message)) as caught:
        appended(observation)
    assert caught.value.reason == reason and reason in REASONS


def test_load_environment_gives_options_and_what_the_class_asks_for():
    named = NamedEnvironment("tests.helpers.environments:Asks", {"size": 3})
    make = load_environment(named, tokenizer=TOKENIZER, stop_ids=(1,))
    first = make()
    second = make()
    assert first is not second and (first.size, first.tokenizer) == (3, TOKENIZER)


def test_an_environment_host_makes_the_environment_of_the_source():
    named = {
        "game": NamedEnvironment("guess", {"guesses": 1}),
        "sizes": NamedEnvironment("tests.helpers.environments:Asks", {"size": 3}),
    }
    host = EnvironmentHost.load(named, tokenizer=TOKENIZER, stop_ids=(1,))
    host.call(0, "start", Prompt(0, (5,), answer=7, source="game"))
    host.call(1, "start", Prompt(1, (5,), source="sizes"))
    assert host.call(0, "step", [5], "7") == StepResult(None, 1.0, True)
    assert host.call(1, "step", [5], "7") == StepResult("ok", 1.0, False)


def test_load_environment_names_the_keys_of_the_source():
    keys = "data.sources.a.environment", "data.sources.a.environment_options"
    with pytest.raises(ValueError, match=r"^data\.sources\.a\.environment: 'guesses', expected"):
        load_environment(NamedEnvironment("guesses", {}, *keys))
    with pytest.raises(
        ValueError, match=r"^data\.sources\.a\.environment_options: \{'size': 1\}: "
    ):
        load_environment(NamedEnvironment("guess", {"size": 1}, *keys))
    named = NamedEnvironment("tools", {"tools": ["no_module:x"]}, *keys)
    with pytest.raises(ValueError, match=r"^data\.sources\.a\.environment_options: tools: 'no_mod"):
        load_environment(named, tokenizer=TOKENIZER, stop_ids=(1,))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("guesses", {}, "turns.environment: 'guesses', expected one of guess, tools, messages, or"),
        ("no_module:X", {}, "turns.environment: 'no_module:X': no module 'no_module'"),
        ("tests.helpers.environments:X", {}, "no 'X' in tests.helpers.environments"),
        ("tests.helpers.environments:HOSTILE", {}, "a dict, expected a function"),
        ("tests.helpers.scripted:ScriptedEngine", {}, "has no start and no step, expected a class"),
        ("tools", {"tools": ["no_module:x"]}, "turns.options: tools: 'no_module:x': no module"),
        ("tests.helpers.environments:Good", {"size": 1}, "turns.options: {'size': 1}: TypeError"),
    ],
)
def test_load_environment_refuses(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_environment(NamedEnvironment(name, options), tokenizer=TOKENIZER, stop_ids=(1,))
