"""Tasks and their options are checked when the plan is compiled, as the run checks them."""

from __future__ import annotations

from typing import Any

import pytest

from pyrl_ext.data.tasks import TASKS, Task
from pyrl_ext.plan.task_options import (
    PICTURES,
    SYMBOLS,
    TASK_NAMES,
    PictureOptions,
    TaskOptions,
    option_problems,
    read_options,
)


def test_SYMBOLS_names_every_task():
    assert list(SYMBOLS) == list(TASKS)
    assert list(TASK_NAMES) == [*TASKS, PICTURES]


@pytest.mark.parametrize("task", SYMBOLS)
@pytest.mark.parametrize(
    "options",
    [
        *({"length": n} for n in (0, 1, 9)),
        *({"length": 3, "min_length": n} for n in (-1, 0, 3, 4)),
        *({"alphabet": n} for n in (1, 2, 9, 10, 11, 26, 27)),
        *({"held_out": n} for n in (1, 2)),
        {"end": "="},
        {"width": 3},
    ],
    ids=str,
)
def test_option_problems_refuses_what_the_task_refuses(task: str, options: dict[str, Any]):
    try:
        Task(task, lambda text: [ord(c) for c in text], 0, options=options)
    except ValueError:
        assert option_problems(task, options)
    else:
        assert option_problems(task, options) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ask": "shape"}, "ask: 'shape', expected colour or count; what the prompt asks"),
        ({"ask": "colour", "answers": 8}, "answers: 8, expected at most 7, the answers of ask col"),
        (
            {"ask": "count", "answers": 5},
            "answers: 5, expected at most 4, the answers of ask count",
        ),
        ({"answers": 1}, "answers: 1, expected at least 2; how many"),
        ({"size": 8}, "size: 8, expected at least 16; width"),
        ({"noise": 128}, "noise: 128, expected at most 127; largest"),
        ({"held_out": 1}, "held_out: 1, expected at least 2; one picture"),
        ({"length": 4}, "length: unknown option, expected one of ask, answers, size, noise, held"),
    ],
    ids=str,
)
def test_read_options_of_pictures_names_the_option_and_its_rule(
    options: dict[str, Any], message: str
):
    with pytest.raises(ValueError) as caught:
        read_options(PICTURES, options)
    assert f"data.task_options.{message}" in str(caught.value)


def test_read_options_of_pictures_takes_what_fits():
    assert read_options(PICTURES, {}) == PictureOptions()
    read = read_options(PICTURES, {"ask": "count", "answers": 9, "size": 24})
    assert read == PictureOptions(ask="count", answers=9, size=24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": "abc"}, "data.task_options.length: 'abc' is text, expected a whole number"),
        ({"length": True}, "data.task_options.length: true is a truth value, expected a whole"),
        ({"length": None}, "data.task_options.length: null, expected a whole number"),
        ({"length": 10**30}, "expected at most 4096"),
        ({"end": ["="]}, "data.task_options.end: ['='] is a list, expected text"),
        ({"width": 3}, "data.task_options.width: unknown option, expected one of length, min_"),
        ({"length": 4, "min_length": 5}, "data.task_options.min_length: 5, expected at most len"),
        ({"alphabet": 27}, "data.task_options.alphabet: 27, expected at most 26, the symbols of"),
    ],
    ids=str,
)
def test_read_options_names_the_option_and_its_rule(options: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        read_options("copy", options)
    assert message in str(caught.value)


def test_read_options_reads_values_and_defaults():
    read = read_options("add", {"length": 5, "end": "="})
    assert read == TaskOptions(length=5, min_length=0, alphabet=6, end="=", held_out=8)


def test_read_options_refuses_an_unknown_task():
    with pytest.raises(ValueError, match=r"data\.task: 'flip', expected one of copy, reverse"):
        read_options("flip", {})
