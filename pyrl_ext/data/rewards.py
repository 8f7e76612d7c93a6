"""Reward functions: two common ones, and how they are called."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pyrl_ext.samples import Prompt, Sample

Reward = Callable[[Prompt, str, list[int]], float]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
_SHOWN = 200


def exact_match(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """1 if the response is the answer, apart from white space around it, else 0."""
    return float(text.strip() == str(prompt.answer).strip())


def number_match(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """1 if the last number of the response is the answer, else at most a half for being close.

    A wrong number counts max(0, 1 - |got - want| / max(|want|, 1)) / 2, no number 0.

    Raises:
        ValueError: the prompt's answer is not a number
    """
    want = _last_number(str(prompt.answer))
    if want is None:
        raise ValueError(f"prompt {prompt.id}: answer {prompt.answer!r}, expected a number")
    got = _last_number(text)
    if got is None:
        return 0.0
    if got == want:
        return 1.0
    return 0.5 * max(0.0, 1 - abs(got - want) / max(abs(want), 1))


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def score(
    samples: Iterable[Sample],
    prompts: Sequence[Prompt],
    reward: Reward,
    decode: Callable[[list[int]], str],
    stop_ids: Sequence[int],
) -> list[Sample]:
    """The samples with their rewards.

    Args:
        samples: of these prompts, in any order
        prompts: with distinct ids
        reward: fn(prompt, text, tokens) -> float; text is the decoded response without a stop
            token at its end (a stop string is part of it), tokens are all its ids
        decode: token ids -> text
        stop_ids: tokens that end a response

    Raises:
        RuntimeError: the reward function raised, or returned something else than a finite number;
            names the function, the prompt, the sample and the completion
    """
    by_id = {prompt.id: prompt for prompt in prompts}

    def one(sample: Sample) -> Sample:
        tokens = sample.response
        text = decode(tokens[:-1] if tokens[-1] in stop_ids else tokens)
        return replace(sample, reward=_one(sample, by_id[sample.prompt_id], reward, text))

    return [one(sample) for sample in samples]


def _one(sample: Sample, prompt: Prompt, reward: Reward, text: str) -> float:
    shown = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    name = getattr(reward, "__qualname__", repr(reward))
    where = (
        f"reward {getattr(reward, '__module__', '?')}:{name}"
        f"(prompt {sample.prompt_id}, sample {sample.index}, completion {shown})"
    )
    try:
        value = reward(prompt, text, sample.response)
    except Exception as error:
        raise RuntimeError(
            f"{where}: raised {type(error).__name__}: {error}, expected a number"
        ) from error
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RuntimeError(f"{where}: returned {value!r}, expected a finite number")
    return float(value)
