"""The reward of the package math-verify, which compares mathematical expressions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pyrl_ext.data.rewards import answer_rule
from pyrl_ext.prompt import Prompt

_ANSWER_SECONDS = 600  # of an answer, which is the user's; the first one loads the grammar
_SECONDS = 5  # of one parse or comparison; the package's alarm needs the worker's main thread


def _is_mathematical(answer: Any) -> bool:
    return answer is not None and bool(_answer(str(answer)))


@answer_rule("a mathematical expression as answer", _is_mathematical)
def math_verify(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """1 if the last expression of the response equals the answer, else 0.

    The answer is LaTeX or plain text, with or without $; of one that ends with ``#### 42``, as
    GSM8K's do, only what follows the mark counts. A comparison that takes longer than 5 s counts 0.

    Raises:
        ValueError: the package finds no expression in the prompt's answer
    """
    from math_verify import parse, verify

    gold = _answer(str(prompt.answer))
    if not gold:
        raise ValueError(
            f"prompt {prompt.id}: answer {prompt.answer!r}, expected a mathematical expression"
        )
    response = parse(text, parsing_timeout=_SECONDS)
    return float(verify(list(gold), response, timeout_seconds=_SECONDS))


@lru_cache(4096)
def _answer(text: str) -> tuple[Any, ...]:
    """The expressions of an answer, which all responses of its group are compared with."""
    from math_verify import parse

    text = text.rpartition("####")[2].strip()
    for form in (f"${text}$", text):
        if found := parse(form, parsing_timeout=_ANSWER_SECONDS):
            return tuple(found)
    return ()
