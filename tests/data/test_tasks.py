"""Built-in tasks: their answers, their streams of prompts and their credit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.data.tasks import TASKS, Task, common_subsequence
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.samples import Prompt

EOS = 1


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def task(name: str = "copy", seed: int = 0, **options: Any) -> Task:
    return Task(name, encode, EOS, seed, options)


@pytest.mark.parametrize(
    ("name", "letters", "answer"),
    [
        ("copy", "badc", "badc"),
        ("reverse", "badc", "cdab"),
        ("sort", "bdca", "abcd"),
        ("next", "abd", "bca"),
    ],
)
def test_tasks_have_exact_answers(name: str, letters: str, answer: str):
    assert TASKS[name](letters, "abcd") == answer


def test_tasks_over_digits_have_exact_answers():
    assert TASKS["countdown"]("3914", "123456789") == "3210"
    assert TASKS["countdown"]("1", "123456789") == "0"
    assert TASKS["add"]("979", "0123456789") == "25"


@pytest.mark.parametrize("name", TASKS)
def test_reward_of_a_right_answer_is_one(name: str):
    made = task(name, length=3, alphabet=6, end="=")
    for prompt in made.take(3, 20) + made.held_out(5):
        assert prompt.tokens == tuple(encode(prompt.text)) and prompt.text.endswith("=")
        right = [*encode(prompt.answer), EOS]
        assert made.reward(prompt, prompt.answer, right) == 1.0
        assert made.reward(prompt, prompt.answer, right[:-1]) == pytest.approx(1 - 1 / len(right))
        assert made.reward(prompt, "", [EOS]) == 1 / len(right)
        assert made.reward(prompt, "", [7] * 5) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("abc|", 1.0),
        ("abc", 3 / 4),
        ("abcc|", 4 / 5),
        ("xabc|", 4 / 5),
        ("ac|", 3 / 4),
        ("cba|", 2 / 4),
        ("xxxxxxxxxx", 0.0),
    ],
)
def test_reward_gives_partial_credit(response: str, reward: float):
    tokens = [EOS if c == "|" else ord(c) for c in response]
    assert task().reward(Prompt(0, (97,), "abc"), response, tokens) == pytest.approx(reward)


def test_common_subsequence_equals_the_search_over_all_subsequences():
    def parts(x: tuple[int, ...]) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = {()}
        for item in x:
            found |= {(*p, item) for p in found}
        return found

    for a, b in (((1, 2, 3, 2), (2, 1, 2, 3)), ((1, 1, 2), (2, 1, 1, 1)), ((), (1,)), ((3,), (4,))):
        assert common_subsequence(a, b) == max(len(p) for p in parts(a) & parts(b))


def test_take_is_a_function_of_seed_and_step():
    first = task(seed=1).take(4, 16)
    assert first == task(seed=1).take(4, 16)
    assert [p.id for p in first] == list(range(64, 80))
    assert [p.text for p in first] != [p.text for p in task(seed=1).take(5, 16)]
    assert [p.text for p in first] != [p.text for p in task(seed=2).take(4, 16)]


def test_held_out_prompts_are_distinct_and_never_taken():
    made = task(length=3, alphabet=8)
    held = [p.text for p in made.held_out(40)]
    assert len(set(held)) == 40 and held[:10] == [p.text for p in made.held_out(10)]
    trained = {p.text for step in range(100) for p in made.take(step, 32)}
    assert len(trained) > 300 and not trained & set(held)
    assert all(p.id < 0 for p in made.held_out(3))


def test_take_follows_the_options():
    made = task(length=5, min_length=2, alphabet=3, end="->")
    sizes = {len(p.text) - 2 for step in range(5) for p in made.take(step, 20)}
    assert sizes == {2, 3, 4, 5}
    assert set("".join(p.text for p in made.take(0, 50))) == set("abc->")


def test_held_out_refuses_a_task_without_any():
    with pytest.raises(ValueError, match="no held-out prompt among 10000 draws of length 1"):
        task(length=1, alphabet=2, held_out=1000).held_out(1)


def test_held_out_refuses_more_than_there_are():
    with pytest.raises(
        ValueError, match=r"held-out prompts of length 3 over 4 symbols, expected 64"
    ):
        task(length=3, alphabet=4).held_out(64)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("juggle", {}, "data.task: 'juggle', expected one of copy, "),
        ("copy", {"length": "abc"}, "data.task_options.length: 'abc' is text, expected a whole"),
        ("copy", {"alphabet": 27}, "data.task_options.alphabet: 27, expected at most 26"),
    ],
)
def test_task_refuses_what_the_plan_refuses(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        task(name, **options)


def test_task_encodes_with_the_tiny_tokenizer():
    tokenizer = load_tokenizer(Path(__file__).parents[2] / "configs/tiny")
    made = Task("reverse", lambda text: tokenizer(text)["input_ids"], tokenizer.eos_token_id)
    for prompt in made.take(0, 4):
        assert tokenizer.decode(list(prompt.tokens)) == prompt.text
        response = [*tokenizer(prompt.text[::-1])["input_ids"], tokenizer.eos_token_id]
        assert made.reward(prompt, "", response) == 1.0
