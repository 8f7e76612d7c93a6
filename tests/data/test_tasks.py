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
def test_answers(name: str, letters: str, answer: str):
    assert TASKS[name](letters, "abcd") == answer


def test_digits():
    assert TASKS["countdown"]("3914", "123456789") == "3210"
    assert TASKS["countdown"]("1", "123456789") == "0"
    assert TASKS["add"]("979", "0123456789") == "25"


@pytest.mark.parametrize("name", TASKS)
def test_right_answers_earn_one_and_prompts_are_encoded(name: str):
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
def test_partial_credit(response: str, reward: float):
    tokens = [EOS if c == "|" else ord(c) for c in response]
    assert task().reward(Prompt(0, (97,), "abc"), response, tokens) == pytest.approx(reward)


def test_common_subsequence_against_all_subsequences():
    def parts(x: tuple[int, ...]) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = {()}
        for item in x:
            found |= {(*p, item) for p in found}
        return found

    for a, b in (((1, 2, 3, 2), (2, 1, 2, 3)), ((1, 1, 2), (2, 1, 1, 1)), ((), (1,)), ((3,), (4,))):
        assert common_subsequence(a, b) == max(len(p) for p in parts(a) & parts(b))


def test_streams_are_functions_of_seed_and_step():
    first = task(seed=1).take(4, 16)
    assert first == task(seed=1).take(4, 16)
    assert [p.id for p in first] == list(range(64, 80))
    assert [p.text for p in first] != [p.text for p in task(seed=1).take(5, 16)]
    assert [p.text for p in first] != [p.text for p in task(seed=2).take(4, 16)]


def test_held_out_prompts_are_distinct_and_never_trained_on():
    made = task(length=3, alphabet=8)
    held = [p.text for p in made.held_out(40)]
    assert len(set(held)) == 40 and held[:10] == [p.text for p in made.held_out(10)]
    trained = {p.text for step in range(100) for p in made.take(step, 32)}
    assert len(trained) > 300 and not trained & set(held)
    assert all(p.id < 0 for p in made.held_out(3))


def test_options_change_the_prompts():
    made = task(length=5, min_length=2, alphabet=3, end="->")
    sizes = {len(p.text) - 2 for step in range(5) for p in made.take(step, 20)}
    assert sizes == {2, 3, 4, 5}
    assert set("".join(p.text for p in made.take(0, 50))) == set("abc->")


def test_no_held_out_prompt_at_all():
    with pytest.raises(ValueError, match="no held-out prompt among 10000 draws of length 1"):
        task(length=1, alphabet=2, held_out=1000).held_out(1)


def test_too_few_held_out_prompts():
    with pytest.raises(
        ValueError, match=r"held-out prompts of length 3 over 4 symbols, expected 64"
    ):
        task(length=3, alphabet=4).held_out(64)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("juggle", {}, "data.task: 'juggle', expected one of copy, "),
        ("copy", {"size": 3, "base": 1}, "data.task_options: base, size, expected some of length"),
        ("copy", {"length": 0}, "task copy, option length: 0, expected at least 1"),
        ("copy", {"alphabet": 27}, "option alphabet: 27, expected 2 to 26"),
        ("add", {"alphabet": 11}, "option alphabet: 11, expected 2 to 10"),
        ("copy", {"min_length": 5}, "option min_length: 5, expected 0 to length 4"),
        ("copy", {"held_out": 1}, "option held_out: 1, expected at least 2"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        task(name, **options)


def test_with_the_tiny_tokenizer():
    tokenizer = load_tokenizer(Path(__file__).parents[2] / "configs/tiny")
    made = Task("reverse", lambda text: tokenizer(text)["input_ids"], tokenizer.eos_token_id)
    for prompt in made.take(0, 4):
        assert tokenizer.decode(list(prompt.tokens)) == prompt.text
        response = [*tokenizer(prompt.text[::-1])["input_ids"], tokenizer.eos_token_id]
        assert made.reward(prompt, "", response) == 1.0
