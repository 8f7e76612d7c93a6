"""The reward of math-verify, against a table of expressions and in a worker process."""

from __future__ import annotations

import pytest

from pyrl_ext.data import math_reward
from pyrl_ext.data.math_reward import math_verify
from pyrl_ext.data.rewards import WorkerReward, load_reward
from pyrl_ext.prompt import Prompt


@pytest.fixture(autouse=True)
def _on_a_busy_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(math_reward, "_SECONDS", 600)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("42", "so it is 42.", 1),
        ("42", r"\boxed{42}", 1),
        ("42", "it is 41 or so", 0),
        ("42", "", 0),
        (42, "The answer is $42$", 1),
        (r"\frac{1}{2}", r"hence $0.5$", 1),
        (r"\frac{1}{2}", r"hence \boxed{\frac{2}{4}}", 1),
        (r"$x^2+2x+1$", r"$(x+1)^2$", 1),
        (r"$x^2+2x+1$", r"$(x+2)^2$", 0),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
        ("He has 3 + 4 = 7.\n#### 7", "7", 1),
        ("He has 3 + 4 = 7.\n#### 7", "3", 0),
    ],
)
def test_math_verify_compares_expressions(answer: object, response: str, reward: float):
    assert math_verify(Prompt(0, (1,), answer), response, []) == reward


def test_an_answer_without_an_expression_is_named():
    with pytest.raises(ValueError, match=r"prompt 3: answer '####', expected a mathematical"):
        math_verify(Prompt(3, (1,), "####"), "1", [])


@pytest.mark.multiprocess
def test_the_named_reward_runs_in_a_worker():
    reward = load_reward("math_verify")
    assert isinstance(reward, WorkerReward)
    try:
        calls = [(Prompt(i, (1,), "7"), f"{i}", [1]) for i in (6, 7)]
        futures = reward.pool.submit("score", calls, None)
        assert [f.result().reward for f in futures] == [0.0, 1.0]
        assert reward.answer_rule[0] == "a mathematical expression as answer"
        assert [reward.answer_rule[1](a) for a in (7, "$x^2$", "abc ####", "$$", None)] == [
            True, True, False, False, False,
        ]  # fmt: skip
    finally:
        reward.close()
