"""Reward functions, and how samples are scored."""

from __future__ import annotations

import math
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

from pyrl_ext.data.rewards import exact_match, number_match, score
from pyrl_ext.parallel.user_code import load_function
from pyrl_ext.samples import Prompt, Sample


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        (12, "12", 1.0),
        ("12", "first 7, then 12.", 1.0),
        ("1,200", "it is 1200", 1.0),
        ("-3.5", "x = -3.50", 1.0),
        ("10", "9", 0.45),
        ("10", "100", 0.0),
        ("0", "0.5", 0.25),
        ("10", "ten", 0.0),
        ("10", "", 0.0),
    ],
)
def test_number_match_is_one_or_partial_credit(answer: Any, text: str, reward: float):
    assert number_match(Prompt(0, (1,), answer), text, []) == pytest.approx(reward)


def test_number_match_needs_a_number():
    with pytest.raises(ValueError, match="prompt 4: answer 'many', expected a number"):
        number_match(Prompt(4, (1,), "many"), "3", [])


def test_exact_match_ignores_white_space_around():
    assert exact_match(Prompt(0, (1,), "yes"), " yes\n", []) == 1.0
    assert exact_match(Prompt(0, (1,), 3), "4", []) == 0.0


def sample(prompt: int, index: int, text: str, reason: str) -> Sample:
    tokens = torch.tensor([5, *map(ord, text), *([1] if reason == "stop" else [])])
    places = torch.arange(len(tokens))
    return Sample(
        prompt, index, tokens, 1, places >= 1, -(places >= 1).float(), None, (),
        torch.zeros(len(tokens), dtype=torch.bool), 0, reason,
    )  # fmt: skip


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_score_gives_the_text_before_the_stop_token():
    seen = []

    def reward(prompt: Prompt, text: str, tokens: list[int]) -> float:
        seen.append((prompt.answer, text, tokens[-1]))
        return len(text)

    samples = [sample(3, 0, "ab", "stop"), sample(4, 1, "abc", "length")]
    prompts = [Prompt(4, (5,), "x"), Prompt(3, (5,), "y")]
    assert [s.reward for s in score(samples, prompts, reward, decode, (1,))] == [2.0, 3.0]
    assert seen == [("y", "ab", 1), ("x", "abc", ord("c"))]
    assert math.isnan(samples[0].reward)


HUGE = [pytest.param(10**digits, id=f"{digits} digits") for digits in (400, 5000)]


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, torch.tensor(1.0), *HUGE])
def test_score_refuses_what_is_no_finite_number(value: Any):
    def odd(prompt: Prompt, text: str, tokens: list[int]) -> Any:
        return value

    message = r"odd\(prompt 3, sample 2, completion 'ab'\): returned .*, expected a finite number"
    with pytest.raises(RuntimeError, match=message):
        score([sample(3, 2, "ab", "stop")], [Prompt(3, (5,))], odd, decode, (1,))


@pytest.mark.parametrize("value", [True, 2, 0.5, np.float32(0.5), np.int64(3)])
def test_score_takes_any_number(value: Any):
    [scored] = score([sample(3, 2, "a", "stop")], [Prompt(3, (5,))], lambda *_: value, decode, (1,))
    assert type(scored.reward) is float and scored.reward == value


@pytest.mark.parametrize(
    ("value", "reward", "parts"),
    [
        ({"right": 1, "format": -0.25}, 0.75, {"format": -0.25, "right": 1.0}),
        ({"right": 1.0, "reward": 0.5, "length": 7}, 0.5, {"length": 7.0, "right": 1.0}),
        ({"reward": np.float32(2.0)}, 2.0, {}),
    ],
)
def test_score_adds_up_components_unless_the_reward_is_given(value: Any, reward: float, parts: Any):
    [scored] = score([sample(3, 2, "a", "stop")], [Prompt(3, (5,))], lambda *_: value, decode, (1,))
    assert (scored.reward, scored.components) == (reward, parts)
    assert [*scored.components] == sorted(parts)  # the same order on every rank


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"right": 1.0, "format": math.nan}, "nan as format, expected a finite number"),
        ({"right": "1"}, "'1' as right, expected a finite number"),
        ({"reward": math.inf, "a": 1.0}, "inf as reward, expected a finite number"),
        ({"a": 1e308, "b": 1e308}, "components with the sum inf, expected a finite number"),
        ({}, "no components, expected at least one"),
        (
            {"kl": 1.0},
            "a component 'kl', expected a name of letters, digits and _.- that is not kl",
        ),
        ({"a,b": 1.0}, "a component 'a,b', expected a name of letters"),
        ({7: 1.0}, "a component 7, expected a name of letters"),
    ],
)
def test_score_refuses_components_by_name(value: Any, message: str):
    def odd(prompt: Prompt, text: str, tokens: list[int]) -> Any:
        return value

    where = r"odd\(prompt 3, sample 2, completion 'ab'\): returned "
    with pytest.raises(RuntimeError, match=where + message):
        score([sample(3, 2, "ab", "stop")], [Prompt(3, (5,))], odd, decode, (1,))


def test_score_reports_what_a_reward_function_raises():
    def fragile(prompt: Prompt, text: str, tokens: list[int]) -> float:
        return {"a": 1.0}[text]

    message = (
        r"test_rewards:.*fragile\(prompt 3, sample 2, completion 'z+\.\.\.'\): raised KeyError: 'z"
    )
    with pytest.raises(RuntimeError, match=message) as caught:
        score([sample(3, 2, "z" * 300, "length")], [Prompt(3, (5,))], fragile, decode, (1,))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "z" * 201 not in str(caught.value).split("raised")[0]


def loaded(name: str) -> Any:
    return load_function("data.reward", f"{__name__}:{name}", 3)


def switches_gradients_off(prompt: Prompt, text: str, tokens: list[int]) -> float:
    torch.set_grad_enabled(False)
    return 1.0


def exits(prompt: Prompt, text: str, tokens: list[int]) -> float:
    sys.exit()


def surrogate(prompt: Prompt, text: str, tokens: list[int]) -> float:
    raise ValueError("\ud800" * 5_000_000)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("switches_gradients_off", r"changed torch.is_grad_enabled\(\) from True to False"),
        ("exits", r"raised SystemExit, expected it to return; ending the process"),
        ("surrogate", r"raised ValueError: (\\ud800){500}\.\.\. \(5,000,000 characters\)"),
    ],
)
def test_score_names_a_reward_that_disturbs_the_process(name: str, message: str):
    where = rf"reward .*test_rewards:{name}\(prompt 3, sample 2, completion 'ab'\): "
    with pytest.raises(RuntimeError, match=where + ".*" + message) as caught:
        score([sample(3, 2, "ab", "stop")], [Prompt(3, (5,))], loaded(name), decode, (1,))
    assert torch.is_grad_enabled()
    str(caught.value).encode()


def test_score_names_a_reward_that_exits_unguarded():
    with pytest.raises(
        RuntimeError, match=r"exits\(prompt 3.*raised SystemExit, expected a number"
    ):
        score([sample(3, 2, "ab", "stop")], [Prompt(3, (5,))], exits, decode, (1,))


def sleeps(prompt: Prompt, text: str, tokens: list[int]) -> float:
    try:
        time.sleep(3600)
    except Exception:  # what a careless function does
        return 0.0
    return 1.0


@pytest.mark.parametrize("guard", [True, False])
def test_score_ends_a_reward_at_its_timeout(guard: bool):
    before = signal.getsignal(signal.SIGRTMIN + 6)
    message = (
        r"sleeps\(prompt 3, .*: no result after 0.2 s, expected one within data.reward_timeout"
    )
    with pytest.raises(RuntimeError, match=message):
        reward = loaded("sleeps") if guard else sleeps
        score([sample(3, 2, "ab", "stop")], [Prompt(3, (5,))], reward, decode, (1,), timeout=0.2)
    assert signal.getsignal(signal.SIGRTMIN + 6) == before


def test_answer_rule_holds_for_what_the_common_rewards_take():
    rule, holds = vars(number_match)["answer_rule"]
    assert rule == "a number as answer"
    assert [holds(x) for x in (3, "so 1,200", "many", None)] == [True, True, False, False]
    assert vars(loaded("number_match"))["answer_rule"] == (rule, holds)
    assert [vars(exact_match)["answer_rule"][1](x) for x in ("", 0, None)] == [True, True, False]
