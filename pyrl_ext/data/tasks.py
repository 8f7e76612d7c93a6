"""Built-in tasks over text: unlimited prompts from a seed, exact answers, partial credit.

They are small on purpose: a model of a few layers learns one from random weights in minutes on a
CPU, so that a whole training run can be watched, tested and bisected without a download.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

from pyrl_ext.plan.task_options import SYMBOLS, TaskOptions, read_options
from pyrl_ext.prompt import Prompt

DRAWS = 10_000  # tries for a prompt on one side of a split


def _next(letters: str, alphabet: str) -> str:
    """Every letter becomes the next one of the alphabet, the last one the first."""
    return letters.translate(str.maketrans(alphabet, alphabet[1:] + alphabet[0]))


TASKS: dict[str, Callable[[str, str], str]] = {
    "copy": lambda letters, alphabet: letters,
    "reverse": lambda letters, alphabet: letters[::-1],
    "sort": lambda letters, alphabet: "".join(sorted(letters)),
    "next": _next,
    # all digits below the last one, down to 0, which is in no prompt
    "countdown": lambda digits, alphabet: "9876543210"[-int(digits[-1]) :],
    "add": lambda digits, alphabet: str(sum(map(int, digits))),
}


class Task:
    """A stream of prompts with their reward.

    Args:
        name: one of `TASKS`
        encode: text -> token ids
        eos_id: token that ends a response; a right answer ends with it
        seed: of the stream, and of what is held out
        options: as `data.task_options`, see `plan.task_options.TaskOptions`
        stream: name of the stream; others of the same seed have other prompts

    Raises:
        ValueError: unknown task or option, or a value of a wrong type or outside its range
    """

    def __init__(
        self,
        name: str,
        encode: Callable[[str], Sequence[int]],
        eos_id: int,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        stream: str = "train",
    ):
        self.name = name
        self.stream = stream
        self.seed = seed
        read = read_options(name, options or {})
        assert isinstance(read, TaskOptions)  # `Pictures` has the others
        self.options = read
        self.alphabet = SYMBOLS[name][: self.options.alphabet]
        # the same few answers are encoded for every response
        self.encode = lru_cache(4096)(lambda text: tuple(encode(text)))
        self.eos_id = eos_id

    def take(self, step: int, n: int, first: int | None = None) -> list[Prompt]:
        """See `Prompts.take`."""
        draw = random.Random(f"{self.seed}/{self.stream}/{step}")
        start = step * n if first is None else first
        return [self._prompt(start + i, self._text(draw, held_out=False)) for i in range(n)]

    def held_out(self, n: int) -> list[Prompt]:
        """The first n of the distinct prompts (ids -1, -2, ...) that `take` never returns.

        Raises:
            ValueError: the task does not have that many
        """
        draw = random.Random(f"{self.seed}/held-out")
        texts: dict[str, None] = {}
        misses = 0
        while len(texts) < n and misses < 50 * n + 1000:
            size = len(texts)
            texts[self._text(draw, held_out=True)] = None
            misses += len(texts) == size
        if len(texts) < n:
            raise ValueError(
                f"task {self.name}: {len(texts)} held-out prompts of length "
                f"{self.options.length} over {len(self.alphabet)} symbols, expected {n}; "
                "take longer prompts, a larger alphabet or fewer evaluation prompts"
            )
        return [self._prompt(-1 - i, text) for i, text in enumerate(texts)]

    def reward(self, prompt: Prompt, text: str, tokens: list[int]) -> float:
        """`credit` of the response for the answer; both include the end token, so a right answer
        that does not stop earns less than 1."""
        return credit([*self.encode(prompt.answer), self.eos_id], tokens)

    def _text(self, draw: random.Random, held_out: bool) -> str:
        low = self.options.min_length or self.options.length

        def one() -> str:
            size = draw.randint(low, self.options.length)
            return "".join(draw.choice(self.alphabet) for _ in range(size))

        if (text := draw_split(one, self.seed, self.options.held_out, held_out)) is not None:
            return text
        kind = "held-out" if held_out else "training"
        raise ValueError(
            f"task {self.name}: no {kind} prompt among {DRAWS} draws of length "
            f"{self.options.length} over {len(self.alphabet)} symbols, expected some; take longer "
            "prompts or a larger alphabet"
        )

    def _prompt(self, number: int, letters: str) -> Prompt:
        text = letters + self.options.end
        answer = TASKS[self.name](letters, self.alphabet)
        return Prompt(id=number, tokens=self.encode(text), answer=answer, text=text)


def draw_split[T](draw: Callable[[], T], seed: int, one_in: int, held_out: bool) -> T | None:
    """The first of `DRAWS` draws that is held out, or that is not; None: none is.

    Args:
        one_in: of so many values one is held out; which ones follows from the seed and the value
    """
    for _ in range(DRAWS):
        value = draw()
        if is_held_out(value, seed, one_in) == held_out:
            return value
    return None


def is_held_out(value: object, seed: int, one_in: int) -> bool:
    """True for one value in ``one_in``; which ones follows from the seed and the value."""
    digest = sha256(f"{seed}/{value}".encode()).digest()
    return int.from_bytes(digest[:8]) % one_in == 0


def credit(target: Sequence[int], tokens: Sequence[int]) -> float:
    """Length of the longest common subsequence of both, over the longer length."""
    return common_subsequence(target, tokens) / max(len(target), len(tokens))


def common_subsequence(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest sequence that both contain in order, with gaps."""
    best = [0] * (len(second) + 1)
    for x in first:
        diagonal = 0
        for j, y in enumerate(second, 1):
            above = best[j]
            best[j] = diagonal + 1 if x == y else max(above, best[j - 1])
            diagonal = above
    return best[-1]
