"""Tasks of the package reasoning-gym: unlimited prompts from a seed, and the package's scorers."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import count
from typing import Any

from pyrl_ext.data.tasks import is_held_out
from pyrl_ext.data.time_limit import Late, time_limit
from pyrl_ext.plan.gym_tasks import PREFIX, gym_dataset
from pyrl_ext.prompt import Prompt

HELD_OUT = 8  # one question in so many is kept for evaluation

SECONDS = 5.0  # of a scorer

_CHUNK = 64  # entries of a dataset that is made at once: some tasks make all of them at first
_DRAWS = 2000  # entries in a row that are not taken, at most

type Entry = dict[str, Any]


class GymTask:
    """A stream of prompts of one task.

    Whether a question is held out follows from the seed and its text, so none is on both sides. A
    question that is longer than ``max_prompt_tokens`` is drawn again.

    Args:
        task: ``reasoning_gym:<name>``
        encode: question -> token ids of the prompt
        max_prompt_tokens: of a prompt [tokens]
        seed: of the stream, and of what is held out
        options: as ``data.task_options``, which the package names
        stream: name of the stream; others of the same seed have other prompts
        key: section of the config that names the task, for messages
    """

    def __init__(
        self,
        task: str,
        encode: Callable[[str], Sequence[int]],
        max_prompt_tokens: int,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        stream: str = "train",
        key: str = "data",
    ):
        self.task = task
        self.stream = stream
        self.key = key
        self.encode = encode
        self.max_prompt_tokens = max_prompt_tokens
        self.seed = seed
        self.options = dict(options or {})
        self._written = json.dumps(self.options, sort_keys=True)

    def take(self, step: int, n: int, first: int | None = None) -> list[Prompt]:
        """See `Prompts.take`. Raises: ValueError if the task does not have them."""
        prompts = self._draw(f"{self.seed}/{self.stream}/{step}", held_out=False)
        start = step * n if first is None else first
        return [self._prompt(start + i, *next(prompts)) for i in range(n)]

    def held_out(self, n: int) -> list[Prompt]:
        """The first n of the distinct prompts (ids -1, -2, ...) that `take` never returns.

        Raises: ValueError if the task does not have that many.
        """
        found: dict[str, Prompt] = {}
        repeated = 0
        for tokens, entry in self._draw(f"{self.seed}/held-out", held_out=True):
            if len(found) == n or repeated == _DRAWS:
                break
            repeated += entry["question"] in found
            found.setdefault(entry["question"], self._prompt(-1 - len(found), tokens, entry))
        if len(found) < n:
            raise ValueError(
                f"{self.key}.task: {self.task} has {len(found)} held-out questions with these "
                f"{self.key}.task_options, expected {n}; make the task larger, or take fewer "
                "evaluate.prompts"
            )
        return list(found.values())

    def _prompt(self, number: int, tokens: Sequence[int], entry: Entry) -> Prompt:
        meta = {"task": self.task, "options": self._written, "entry": entry}
        text = entry["question"]
        return Prompt(number, tuple(tokens), entry["answer"], text, meta)

    def _draw(self, stream: str, held_out: bool) -> Iterator[tuple[Sequence[int], Entry]]:
        """The tokens and entries of one side of the split, without end."""
        others = 0
        longest = 0
        for entry in self._entries(stream):
            if others == _DRAWS:
                side = "held-out" if held_out else "training"
                raise ValueError(
                    f"{self.key}.task: no {side} question of {self.task} among {_DRAWS} draws with "
                    f"these {self.key}.task_options, expected one of at most "
                    f"data.max_prompt_tokens {self.max_prompt_tokens} tokens; the longest had "
                    f"{longest}. Make the task larger, or data.max_prompt_tokens"
                )
            others += 1
            if is_held_out(entry["question"], self.seed, HELD_OUT) != held_out:
                continue
            tokens = self.encode(entry["question"])
            longest = max(longest, len(tokens))
            if len(tokens) <= self.max_prompt_tokens:
                others = 0
                yield tokens, entry

    def _entries(self, stream: str) -> Iterator[Entry]:
        for chunk in count():
            digest = sha256(f"{stream}/{chunk}".encode()).digest()
            seed = int.from_bytes(digest[:4])
            dataset = gym_dataset(self.task, self.options, seed, _CHUNK)
            for number in range(_CHUNK):
                yield _entry(dataset, number, seed)


def _entry(dataset: Any, number: int, seed: int) -> Entry:
    """An entry of a dataset; codeio draws from the process' random state as well."""
    state = random.getstate()
    random.seed(seed + number)
    try:
        return dataset[number]
    finally:
        random.setstate(state)


def score(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """The package's score of a response: of what its last <answer> tags hold, or of all of it.

    It runs in the main thread of a worker process. What a scorer cannot take counts 0: it raises,
    takes longer than 5 s, or would run code of the response.
    """
    from reasoning_gym.utils import extract_answer

    assert prompt.meta is not None  # `GymTask` fills it
    answer = extract_answer(text)
    if answer is None:
        answer = text.strip()
    task: str = prompt.meta["task"]
    if not is_harmless(task, answer):
        return 0.0
    scorer = _scorer(task, prompt.meta["options"])
    try:
        with time_limit(SECONDS):
            return float(scorer(answer=answer, entry=prompt.meta["entry"]))
    except (Exception, SystemExit, Late):  # prime_factorization parses an answer without a check
        return 0.0


def is_harmless(task: str, answer: str) -> bool:
    """True if the scorer of a task runs no code that is in an answer.

    Four scorers call ``eval`` on the answer: it must be a literal, or call nothing. Others call
    sympy's ``parse_expr``, which evaluates what it has parsed: an expression of numbers, names and
    operators reaches no function but sympy's.
    """
    name = task.removeprefix(PREFIX)
    if name in _EVALUATE:
        return "(" not in answer or _is_literal(answer)
    if name in _PARSE:
        return not _NO_OPERATORS & set(answer)
    return True


_EVALUATE = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_PARSE = {
    "countdown",
    "intermediate_integration",
    "puzzle24",
    "simple_integration",
}
_NO_OPERATORS = {*"_'\"`[]{}@:;\\\n"}


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


@lru_cache(64)
def _scorer(task: str, options: str) -> Callable[..., float]:
    return gym_dataset(task, json.loads(options), seed=0, size=1).score_answer
