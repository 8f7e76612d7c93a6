"""The built-in tasks and the options they take, for the plan's rules and for `data/tasks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pyrl_ext.plan.language.errors import expectation, show

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYMBOLS: dict[str, str] = {
    "copy": LETTERS,
    "reverse": LETTERS,
    "sort": LETTERS,
    "next": LETTERS,
    "countdown": "123456789",
    "add": "0123456789",
}
"""Task -> the symbols that its prompts are made of."""


class TaskOptions(BaseModel):
    """Difficulty of a built-in task."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    length: Annotated[int, Field(ge=1, le=4096)] = 4
    """largest number of symbols in a prompt"""
    min_length: Annotated[int, Field(ge=0)] = 0
    """smallest number of symbols in a prompt; 0: always length"""
    alphabet: Annotated[int, Field(ge=2)] = 6
    """how many of the task's symbols are used"""
    end: str = ""
    """text after the symbols, which marks where the answer begins"""
    held_out: Annotated[int, Field(ge=2)] = 8
    """one prompt in this many is kept for evaluation and never trained on"""


class OptionProblem(NamedTuple):
    """The problem of one option of a task, or None."""

    option: str
    message: str

    def __str__(self) -> str:
        return f"data.task_options.{self.option}: {self.message}"


def task_problem(task: str) -> str | None:
    """Why there is no such task, or None."""
    if task in SYMBOLS:
        return None
    return (
        f"{show(task)}, expected one of {', '.join(SYMBOLS)}. For prompts of your own, set "
        "data.prompts and data.reward instead"
    )


def option_problems(task: str, options: Mapping[str, object]) -> list[OptionProblem]:
    """The problems of the options of `task`, a key of `SYMBOLS`; empty: nothing."""
    try:
        read = TaskOptions.model_validate(dict(options))
    except ValidationError as error:
        return [_problem(each) for each in error.errors(include_url=False)]
    problems, symbols = [], len(SYMBOLS[task])
    if read.min_length > read.length:
        rule = f"at most length {read.length}"
        problems.append(OptionProblem("min_length", f"{read.min_length}, expected {rule}"))
    if read.alphabet > symbols:
        rule = f"at most {symbols}, the symbols of task {task}"
        problems.append(OptionProblem("alphabet", f"{read.alphabet}, expected {rule}"))
    return problems


def read_options(task: str, options: Mapping[str, object]) -> TaskOptions:
    """The options of `task`. Raises `ValueError` with every problem, one a line."""
    if problem := task_problem(task):
        raise ValueError(f"data.task: {problem}")
    if problems := option_problems(task, options):
        raise ValueError("\n".join(map(str, problems)))
    return TaskOptions.model_validate(dict(options))


def _problem(error: ErrorDetails) -> OptionProblem:
    name, fields = str(error["loc"][0]), TaskOptions.model_fields
    if name not in fields:
        return OptionProblem(name, f"unknown option, expected one of {', '.join(fields)}")
    return OptionProblem(name, f"{expectation(error)}; {fields[name].description}")
