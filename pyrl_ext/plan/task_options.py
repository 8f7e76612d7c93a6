"""The built-in tasks and the options they take, for the plan's rules and for `data/tasks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pyrl_ext.plan.gym_tasks import gym_task_problem, is_gym_task
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
"""Task over text -> the symbols that its prompts are made of."""

PICTURES = "pictures"
"""The task over images."""

TASK_NAMES = (*SYMBOLS, PICTURES)

COLOURS = ("red", "green", "blue", "yellow", "cyan", "magenta", "white")
CELL = 8  # pixels: the squares of a picture are counted, one a cell at most


class _Options(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class TaskOptions(_Options):
    """Difficulty of a built-in task over text."""

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


class PictureOptions(_Options):
    """Difficulty of the task over images."""

    ask: Literal["colour", "count"] = "colour"
    """what the prompt asks for: the colour of a square, or how many squares"""
    answers: Annotated[int, Field(ge=2)] = 4
    """how many different answers there are"""
    size: Annotated[int, Field(ge=16, le=512)] = 16
    """width and height of a picture [pixels]"""
    noise: Annotated[int, Field(ge=0, le=127)] = 16
    """largest change of a pixel's number at random, of 0 to 255"""
    held_out: Annotated[int, Field(ge=2)] = 8
    """one picture in this many is kept for evaluation and never trained on"""

    @property
    def most_answers(self) -> int:
        """Number of different answers a picture can have."""
        cells = (self.size // CELL) ** 2
        return len(COLOURS) if self.ask == "colour" else min(9, cells)


Options = TaskOptions | PictureOptions


class OptionProblem(NamedTuple):
    """The problem of one option of a task, or None."""

    option: str
    message: str

    def __str__(self) -> str:
        return f"data.task_options.{self.option}: {self.message}"


def task_problem(task: str) -> str | None:
    """Why there is no such task, or None."""
    if task in TASK_NAMES:
        return None
    if is_gym_task(task):
        return gym_task_problem(task)
    return (
        f"{show(task)}, expected one of {', '.join(TASK_NAMES)}, or reasoning_gym:<name>. For "
        "prompts of your own, set data.prompts and data.reward instead"
    )


def option_problems(task: str, options: Mapping[str, object]) -> list[OptionProblem]:
    """The problems of the options of `task`, one of `TASK_NAMES`; empty: nothing."""
    kind = _kind(task)
    try:
        read = kind.model_validate(dict(options))
    except ValidationError as error:
        return [_problem(kind, each) for each in error.errors(include_url=False)]
    problems: list[OptionProblem] = []
    if isinstance(read, PictureOptions):
        if read.answers > (most := read.most_answers):
            rule = f"at most {most}, the answers of ask {read.ask} at size {read.size}"
            problems.append(OptionProblem("answers", f"{read.answers}, expected {rule}"))
        return problems
    if read.min_length > read.length:
        rule = f"at most length {read.length}"
        problems.append(OptionProblem("min_length", f"{read.min_length}, expected {rule}"))
    if read.alphabet > (symbols := len(SYMBOLS[task])):
        rule = f"at most {symbols}, the symbols of task {task}"
        problems.append(OptionProblem("alphabet", f"{read.alphabet}, expected {rule}"))
    return problems


def read_options(task: str, options: Mapping[str, object]) -> Options:
    """The options of `task`. Raises `ValueError` with every problem, one a line."""
    if problem := task_problem(task):
        raise ValueError(f"data.task: {problem}")
    if problems := option_problems(task, options):
        raise ValueError("\n".join(map(str, problems)))
    return _kind(task).model_validate(dict(options))


def _kind(task: str) -> type[TaskOptions] | type[PictureOptions]:
    return PictureOptions if task == PICTURES else TaskOptions


def _problem(kind: type[BaseModel], error: ErrorDetails) -> OptionProblem:
    name = str(error["loc"][0])
    fields = kind.model_fields
    if name not in fields:
        return OptionProblem(name, f"unknown option, expected one of {', '.join(fields)}")
    return OptionProblem(name, f"{expectation(error)}; {fields[name].description}")
