"""Reward functions: two common ones, and how they are called."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pyrl_ext.data.time_limit import TimeLimit, TimeUp
from pyrl_ext.parallel.user_code import SettingsChanged, UserExit, describe, shown
from pyrl_ext.samples import Prompt, Sample

Reward = Callable[[Prompt, str, list[int]], float | Mapping[str, float]]

WHOLE = "reward"  # of a mapping: the reward itself, where it is not the sum of the components
TAKEN = ("kl", "overlong")  # metrics below reward/ that are no components

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SHOWN = 200  # characters of a completion or a returned value


def answer_rule(rule: str, holds: Callable[[Any], bool]) -> Callable[[Reward], Reward]:
    """Decorator of a reward: records without a proper `answer` are refused when they are loaded.

    Args:
        rule: the answer that the reward needs, for messages.
        holds: whether an answer (None: the record has none) is one.
    """

    def mark(reward: Reward) -> Reward:
        vars(reward)["answer_rule"] = rule, holds
        return reward

    return mark


def _has_number(answer: Any) -> bool:
    return answer is not None and _last_number(str(answer)) is not None


@answer_rule("an answer", lambda answer: answer is not None)
def exact_match(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """1 if the response is the answer, apart from white space around it, else 0."""
    return float(text.strip() == str(prompt.answer).strip())


@answer_rule("a number as answer", _has_number)
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
    timeout: float | None = None,
) -> list[Sample]:
    """The samples with their rewards.

    A line on stderr names a call that has run for long.

    Args:
        samples: of these prompts, in any order
        prompts: with distinct ids
        reward: fn(prompt, text, tokens) -> float, or its components by name; text is the decoded
            response without a stop token at its end (a stop string is part of it), tokens are all
            its ids
        decode: token ids -> text
        stop_ids: tokens that end a response
        timeout: of one call [s]; None: unlimited

    Raises:
        RuntimeError: the reward function raised, exceeded ``timeout`` or returned something other
            than finite numbers; names the function, the prompt, the sample and the completion
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    scored = []
    with TimeLimit(timeout) as limit:
        for sample in samples:
            tokens = sample.response
            text = decode(tokens[:-1] if tokens[-1] in stop_ids else tokens)
            value, parts = _one(sample, by_id[sample.prompt_id], reward, text, limit)
            scored.append(replace(sample, reward=value, components=parts))
    return scored


def _one(
    sample: Sample, prompt: Prompt, reward: Reward, text: str, limit: TimeLimit
) -> tuple[float, dict[str, float]]:
    """The reward of a sample, and its components."""

    def where() -> str:
        completion = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
        name = getattr(reward, "__qualname__", repr(reward))
        return (
            f"reward {getattr(reward, '__module__', '?')}:{name}"
            f"(prompt {sample.prompt_id}, sample {sample.index}, completion {completion})"
        )

    try:
        with limit.watched(where):
            value = reward(prompt, text, sample.response)
    except TimeUp as error:
        raise RuntimeError(
            f"{where()}: no result after {limit.seconds:g} s, expected one within "
            "data.reward_timeout"
        ) from error
    except (SettingsChanged, UserExit) as error:
        raise RuntimeError(f"{where()}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a function may raise SystemExit or its own kind
        raise RuntimeError(f"{where()}: raised {describe(error)}, expected a number") from error
    try:
        return read_reward(value)
    except ValueError as error:
        raise RuntimeError(f"{where()}: returned {error}") from error


def read_reward(value: object) -> tuple[float, dict[str, float]]:
    """(reward, components) of what a reward function returned: a number without components, or the
    sum of a mapping's, or its entry `WHOLE` beside them.

    Raises: ValueError saying what is no finite number, or no name.
    """
    if not isinstance(value, Mapping):
        return _number(value, shown(value, _SHOWN)), {}
    given = dict(cast(Mapping[object, object], value))
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in TAKEN:
            rule = f"a name of letters, digits and _.- that is not {' or '.join(TAKEN)}"
            raise ValueError(f"a component {shown(name, _SHOWN)}, expected {rule}")
    parts = {str(n): _number(x, f"{shown(x, _SHOWN)} as {n}") for n, x in given.items()}
    if not parts:
        raise ValueError("no components, expected at least one")
    whole = parts.pop(WHOLE) if WHOLE in parts else sum(parts.values())
    return _number(whole, f"components with the sum {whole}"), dict(sorted(parts.items()))


def _number(value: object, what: str) -> float:
    if (number := finite(value)) is None:
        raise ValueError(f"{what}, expected a finite number")
    return number


def finite(value: object) -> float | None:
    """``value`` as a finite float; None: it is not one."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # 10**400
        return None
    return number if math.isfinite(number) else None
