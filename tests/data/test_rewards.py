"""Reward functions, and how samples are scored."""

from __future__ import annotations

import math
import os
import pickle
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyrl_ext.data import rewards
from pyrl_ext.data.rewards import (
    Scorer,
    WorkerReward,
    exact_match,
    load_reward,
    number_match,
)
from pyrl_ext.samples import Prompt, Sample
from tests.helpers.deadline import DEADLINE


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


def score(
    samples: Sequence[Sample], prompts: Sequence[Prompt], reward: Any, decode: Any, stop_ids: Any
) -> list[Sample]:
    """The samples with their rewards."""
    return Scorer(prompts, reward, decode, stop_ids)(samples)(defaultdict(float))


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
    assert caught.value.__cause__ and isinstance(caught.value.__cause__.__cause__, KeyError)
    assert "z" * 201 not in str(caught.value).split("raised")[0]


@pytest.fixture(scope="module")
def acts() -> Iterator[WorkerReward]:
    """A reward in a worker that does what the prompt's answer names."""
    with closing(WorkerReward("tests.helpers.user_rewards:acts")) as reward:
        yield reward


@pytest.fixture(scope="module")
def limited() -> Iterator[WorkerReward]:
    """The same with a time limit."""
    with closing(WorkerReward("tests.helpers.user_rewards:acts", 10.0)) as reward:
        yield reward


def wait_for_end(process: int) -> None:
    end = time.monotonic() + DEADLINE
    while Path(f"/proc/{process}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()


def scores(reward: WorkerReward, *answers: str) -> list[float]:
    prompts = [Prompt(i, (5,), answer) for i, answer in enumerate(answers)]
    samples = [sample(i, 2, "ab", "stop") for i in range(len(answers))]
    return [each.reward for each in score(samples, prompts, reward, decode, (1,))]


def test_score_gives_what_workers_return(acts: WorkerReward):
    answers = ("good", "forks", "changes folder", "prints", "parts", "good", "torch")
    assert scores(acts, *answers) == [1.0, 1.0, 1.0, 1.0, 1.5, 1.0, 0.0]
    first, second = scores(acts, "process", "process")
    assert first == second != os.getpid()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("raises", r"raised KeyError: 'colour' \(.*/user_rewards\.py:\d+\), expected a number"),
        ("raises much", r"raised ValueError: (\\ud800){500}\.\.\. \(5,000,000 characters\)"),
        ("exits", r"raised SystemExit \(.*/user_rewards\.py:\d+\), expected a number"),
        ("no number", "returned <unlocked .*, expected a finite number"),
    ],
)
def test_score_names_a_failed_call_and_keeps_its_worker(
    acts: WorkerReward, answer: str, message: str
):
    before = scores(acts, "process")
    where = r"reward tests.helpers.user_rewards:acts\(prompt 1, sample 2, completion 'ab'\): "
    with pytest.raises(RuntimeError, match=where + message) as caught:
        scores(acts, "good", answer)
    str(caught.value).encode()
    assert scores(acts, "process") == before


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("dies", "its worker process ended with exit code 0, expected the function to return"),
        ("crashes", "its worker process ended with exit code -11"),
        ("leaves a process", "its worker process ended with exit code 4"),
        ("spins", "no result after 10 s, expected one within data.reward_timeout"),
        ("waits for a process", "no result after 10 s"),
    ],
)
def test_score_replaces_a_worker_that_ends_or_hangs(
    limited: WorkerReward, answer: str, message: str
):
    before = scores(limited, "process")
    with pytest.raises(RuntimeError, match=rf"acts\(prompt 2, sample 2, .*\): {message}"):
        scores(limited, "good", "good", answer, "good")
    wait_for_end(int(before[0]))
    assert scores(limited, "process") != before


def test_time_limit_of_a_call_starts_when_its_turn_comes(limited: WorkerReward):
    assert scores(limited, *["takes 4 s"] * 3) == [1.0] * 3


def test_score_gives_the_traceback_of_the_user(acts: WorkerReward):
    with pytest.raises(RuntimeError) as caught:
        scores(acts, "raises")
    assert "user_rewards.py" in str(caught.value.__cause__) and "in _raises" in str(
        caught.value.__cause__
    )


def test_score_refuses_prompts_that_do_not_reach_a_worker(acts: WorkerReward):
    with pytest.raises((AttributeError, pickle.PicklingError)):
        score([sample(0, 2, "ab", "stop")], [Prompt(0, (5,), lambda: None)], acts, decode, (1,))
    assert scores(acts, "good") == [1.0]


def test_load_reward_runs_ours_here_and_those_of_users_in_workers(acts: WorkerReward):
    assert load_reward("pyrl_ext.data.rewards:number_match") is number_match
    with closing(WorkerReward("tests.helpers.user_rewards:number_match")) as reward:
        assert scores(reward, "12", "3") == [0.0, 0.0]
        rule, holds = reward.answer_rule
        assert rule == "a number as answer" and holds("12") and not holds("many")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos._exit(0)\n", "its worker process ended with exit code 0 as it was loaded"),
        ("import sys\nsys.exit(0)\n", "hostile.py:2: module hostile raised SystemExit: 0"),
        ("def fn(a): ...\n", r"takes \(a\), expected 3 positional arguments"),
    ],
)
def test_load_reward_names_what_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
):
    (tmp_path / "hostile.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"data.reward: 'hostile:fn'.*{message}"):
        load_reward("hostile:fn")


def test_score_names_a_call_that_takes_long(
    limited: WorkerReward, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(rewards, "NOTICE_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="no result"):
        scores(limited, "spins")
    line = r"waiting for reward .*:acts\(prompt 0, sample 2, completion 'ab'\) for 0 s so far"
    assert re.search(line, capfd.readouterr().err)


def test_workers_end_with_their_process(tmp_path: Path):
    code = """
import os, signal, sys
from pyrl_ext.data.rewards import WorkerReward
from pyrl_ext.prompt import Prompt
reward = WorkerReward("tests.helpers.user_rewards:acts")
(future,) = reward.pool.submit("score", [(Prompt(0, (1,), "process"), "", [])], None)
print(int(future.result()[0]), flush=True)
os.kill(os.getpid(), signal.Signals[sys.argv[1]])
"""
    for name in ("SIGKILL", "SIGINT"):
        done = subprocess.run(
            [sys.executable, "-c", code, name],
            capture_output=True,
            check=False,
            text=True,
        )
        wait_for_end(int(done.stdout))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_workers_that_load_end_with_their_process(tmp_path: Path, name: str):
    (tmp_path / "hangs.py").write_text(f"""
import os, time
with open("process.part", "w") as file:
    file.write(str(os.getpid()))
os.rename("process.part", "process")
time.sleep({DEADLINE})
""")
    code = """
import os, signal, sys, threading, time
from pyrl_ext.data.rewards import WorkerReward
sys.path.append(os.getcwd())
def stop():
    while not os.path.exists("process"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
threading.Thread(target=stop).start()
WorkerReward("hangs:fn")
"""
    done = subprocess.run([sys.executable, "-c", code, name], cwd=tmp_path, check=False)
    assert done.returncode != 0
    wait_for_end(int((tmp_path / "process").read_text()))


def test_answer_rule_holds_for_what_the_common_rewards_take():
    rule, holds = vars(number_match)["answer_rule"]
    assert rule == "a number as answer"
    assert [holds(x) for x in (3, "so 1,200", "many", None)] == [True, True, False, False]
    assert [vars(exact_match)["answer_rule"][1](x) for x in ("", 0, None)] == [True, True, False]
