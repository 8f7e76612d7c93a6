"""Tasks of reasoning-gym, against the package itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import reasoning_gym

from pyrl_ext.data import gym_task
from pyrl_ext.data.gym_task import GymTask, is_harmless, score
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.data.rewards import number_match
from pyrl_ext.parallel import topology
from pyrl_ext.plan.gym_tasks import gym_dataset
from pyrl_ext.rollout import rollouts
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers.configs import CONFIGS
from tests.helpers.tiny import tiny_plan

SUMS = "reasoning_gym:chain_sum"


def encode(text: str) -> list[int]:
    return list(text.encode())


def task(name: str = SUMS, most: int = 4096, seed: int = 3, **options: Any) -> GymTask:
    return GymTask(name, encode, most, seed, options)


def test_take_gives_the_same_prompts_for_the_same_step_and_others_for_others():
    first = task().take(5, 6)
    assert [p.id for p in first] == [30, 31, 32, 33, 34, 35]
    assert [p.text for p in first] == [p.text for p in task().take(5, 6)]
    assert [p.text for p in first[:3]] == [p.text for p in task().take(5, 3)]
    assert {p.text for p in first}.isdisjoint(p.text for p in task().take(6, 6))
    assert {p.text for p in first}.isdisjoint(p.text for p in task(seed=4).take(5, 6))


def test_prompts_are_entries_of_the_package():
    [prompt] = task(min_terms=3, max_terms=3).take(0, 1)
    assert prompt.tokens == tuple(encode(prompt.text))
    assert prompt.meta is not None
    entry = prompt.meta["entry"]
    assert (entry["question"], entry["answer"]) == (prompt.text, prompt.answer)
    assert entry["metadata"]["num_terms"] == 3
    terms = entry["metadata"]["expression"]
    assert eval(terms) == int(prompt.answer)


def test_held_out_questions_are_never_trained_on():
    """Of two-term sums of one digit there are few, so both sides meet nearly all of theirs."""
    few = task(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    trained = {p.text for step in range(20) for p in few.take(step, 32)}
    held_out = few.held_out(10)
    assert [p.id for p in held_out] == list(range(-1, -11, -1))
    assert len({p.text for p in held_out}) == 10
    assert len(trained) > 100
    assert trained.isdisjoint(p.text for p in held_out)


def test_held_out_names_the_number_that_there_is():
    few = task(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    with pytest.raises(ValueError, match=r"has \d+ held-out questions .*, expected 500; make"):
        few.held_out(500)


def test_longer_prompts_are_drawn_again_and_none_that_fits_is_an_error():
    lengths = {len(p.tokens) for p in task(most=70).take(0, 20)}
    assert max(lengths) <= 70
    assert max(len(p.tokens) for p in task().take(0, 20)) > 70
    with pytest.raises(ValueError, match=r"at most data.max_prompt_tokens 9 tokens; the longest"):
        task(most=9).take(0, 1)


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "acre", "countdown", "basic_arithmetic"])
def test_score_is_that_of_the_package(name: str):
    prompts = task(f"reasoning_gym:{name}").take(1, 4)
    dataset = reasoning_gym.create_dataset(name, size=1, seed=0)
    for prompt in prompts:
        assert prompt.meta is not None
        for answer in (str(prompt.answer), "0", "no idea", f"it is {prompt.answer}, I think"):
            want = dataset.score_answer(answer, prompt.meta["entry"])
            assert score(prompt, f" {answer}\n", []) == want
            tagged = f"4 and <answer>5</answer>, no: <answer> {answer} </answer> done"
            assert score(prompt, tagged, []) == want


def test_a_scorer_that_raises_on_a_response_counts_0():
    name = "reasoning_gym:prime_factorization"
    [prompt] = task(name).take(0, 1)
    assert prompt.meta is not None
    scorer = gym_dataset(name, {}, seed=0, size=1).score_answer
    with pytest.raises(ValueError):
        scorer(answer="nonsense", entry=prompt.meta["entry"])
    assert score(prompt, "nonsense", []) == 0
    assert score(prompt, str(prompt.answer), []) == 1


def test_score_of_a_task_with_options_uses_them():
    options = {"min_terms": 2, "max_terms": 2}
    [prompt] = GymTask(SUMS, encode, 4096, 3, options).take(0, 1)
    assert prompt.meta is not None
    assert json.loads(prompt.meta["options"]) == options


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("spiral_matrix", "exit()"),
        ("string_insertion", "__import__('os').system('true')"),
        ("n_queens", "[c for c in open('/etc/passwd')]"),
        ("countdown", "().__class__.__base__.__subclasses__"),
        ("puzzle24", "Integer('1')"),
        ("simple_integration", "x.func.__globals__"),
    ],
)
def test_a_scorer_runs_no_code_of_a_response(name: str, answer: str):
    full = f"reasoning_gym:{name}"
    assert not is_harmless(full, answer)
    [prompt] = task(full).take(0, 1)
    assert score(prompt, f"<answer>{answer}</answer>", []) == 0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("spiral_matrix", "[1, 2, 3]"),
        ("spiral_matrix", "(1, 2, 3)"),
        ("string_insertion", "['A', 'B']"),
        ("countdown", "(3 + 4) * 5 - 6 / 2"),
        ("simple_integration", "x**2/2 + sin(x) + C"),
        ("chain_sum", "exit()"),  # compared as text
    ],
)
def test_answers_that_run_nothing_are_scored(name: str, answer: str):
    assert is_harmless(f"reasoning_gym:{name}", answer)


def test_a_scorer_that_does_not_end_counts_0(monkeypatch: pytest.MonkeyPatch):
    """The scorer evaluates the answer, a power that takes years."""
    monkeypatch.setattr(gym_task, "SECONDS", 0.5)
    [prompt] = task("reasoning_gym:spiral_matrix").take(0, 1)
    assert score(prompt, "<answer>9**9**9**9</answer>", []) == 0
    monkeypatch.setattr(gym_task, "SECONDS", 600)
    assert score(prompt, str(prompt.answer), []) == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


PROMPTS = """
import hashlib, json
from pyrl_ext.data.gym_task import GymTask
for name in ("chain_sum", "codeio", "word_ladder", "countdown", "acre"):
    task = GymTask("reasoning_gym:" + name, lambda text: text.encode(), 100_000, 3, {})
    print(name, [p.text for p in task.take(1, 3)])
"""


@pytest.mark.multiprocess
def test_prompts_are_the_same_in_every_process():
    """Text has another hash in each process, and random another state."""
    printed = set[str]()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROMPTS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        printed.add(done.stdout)
    assert len(printed) == 1 and "chain_sum" in printed.pop()


@pytest.mark.multiprocess
def test_build_source_of_a_task_scores_in_a_worker_and_renders_a_chat():
    overrides = (
        f"data.task={SUMS}",
        "data.task_options={min_terms: 2, max_terms: 2}",
        "data.max_prompt_tokens=400",
        "data.chat=true",
        "data.system_prompt=Answer with a number.",
        f"model.tokenizer={CONFIGS / 'tiny'}",
    )
    source = build_source(tiny_plan(*overrides))
    try:
        [prompt] = source.prompts.take(0, 1)
        text = source.tokenizer.decode(list(prompt.tokens))
        assert "Answer with a number." in text
        assert prompt.text in text
    finally:
        source.close()


@pytest.mark.parametrize(("name", "takes"), [("chain_sum", True), ("spell_backward", False)])
def test_a_reward_takes_the_place_of_the_scorer_if_it_takes_the_answers(name: str, takes: bool):
    plan = tiny_plan(
        f"data.task=reasoning_gym:{name}",
        "data.task_options={}",
        "data.reward=number_match",
        "data.max_prompt_tokens=400",
        "evaluate.sets={sums: {file: data/arithmetic_eval.jsonl}}",
        f"model.tokenizer={CONFIGS / 'tiny'}",
    )
    if takes:
        source = build_source(plan)
        assert source.reward is source.sets["sums"].reward is number_match
        return
    message = r"data.reward: number_match, expected a reward that takes the answers of .*:spell"
    with pytest.raises(ValueError, match=message):
        build_source(plan)


@pytest.mark.multiprocess
def test_a_run_needs_its_held_out_questions_before_an_engine_is_built(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two numbers of one digit have 200 questions, of which about 25 are held out."""
    built = list[str]()
    monkeypatch.setattr(rollouts, "build_engine", lambda *_: built.append("engine"))
    plan = tiny_plan(
        f"data.task={SUMS}",
        "data.task_options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
        "data.max_prompt_tokens=400",
        "evaluate.prompts=64",
        "evaluate.every=1",
    )
    with (
        topology.start(plan) as topo,
        pytest.raises(ValueError, match=r"held-out questions .* expected 64"),
    ):
        RolloutStep.build(plan, topo)
    assert not built
