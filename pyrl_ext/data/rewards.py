"""Reward functions: two common ones, those of users in a worker process, and their calls."""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pyrl_ext.data.workers import CallFailed, Pool
from pyrl_ext.parallel.user_code import describe, load_function, shown
from pyrl_ext.plan.named_rewards import reward_function
from pyrl_ext.prompt import Prompt

if TYPE_CHECKING:
    from pyrl_ext.samples import Sample  # imports torch, which workers do without

Reward = Callable[[Prompt, str, list[int]], float | Mapping[str, float]]

WHOLE = "reward"  # of a mapping: the reward itself, where it is not the sum of the components
TAKEN = ("kl", "overlong")  # metrics below reward/ that are no components

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
NOTICE_SECONDS = 20.0  # until the first notice about a call; each next one after twice the time
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
    """1 if the response is the answer, ignoring surrounding white space, else 0."""
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


class RewardHost:
    """A user's reward function in a worker process."""

    def __init__(self, name: str):
        self._reward = load_function("data.reward", name, 3)
        self.about, self._holds = getattr(self._reward, "answer_rule", (None, bool))

    def call(self, owner: int | None, method: str, *args: Any) -> Any:
        """The reward, or the check of an answer."""
        return self._reward(*args) if method == "score" else self._holds(*args)

    def read(self, method: str, value: Any) -> Any:
        """(reward, components), or whether an answer can be used."""
        return read_reward(value) if method == "score" else bool(value)


class WorkerReward:
    """A user's reward function, which runs in a worker process.

    Args:
        name: module:function
        timeout: of a call [s]; None: no limit

    Raises:
        ValueError: it does not load
    """

    def __init__(self, name: str, timeout: float | None = None):
        self.name = name
        self.timeout = timeout
        self.pool = Pool(f"data.reward: {name!r}", partial(RewardHost, name), serial=True)
        if self.pool.about is not None:
            self.answer_rule = self.pool.about, self._holds

    def close(self) -> None:
        """Stop the worker."""
        self.pool.close()

    def _holds(self, answer: Any) -> bool:
        return self.pool.submit("holds", [(answer,)], None)[0].result()


BUILT_IN: dict[str, Reward] = {
    f"{__name__}:{function.__name__}": function for function in (exact_match, number_match)
}
"""Rewards that run in the process that scores."""


def load_reward(name: str, timeout: float | None = None) -> Reward | WorkerReward:
    """The reward function that ``data.reward`` names.

    Raises:
        ValueError: it does not load
    """
    name = reward_function(name)
    return BUILT_IN[name] if name in BUILT_IN else WorkerReward(name, timeout)


def score(
    samples: Iterable[Sample],
    prompts: Sequence[Prompt],
    reward: Reward | WorkerReward,
    decode: Callable[[list[int]], str],
    stop_ids: Sequence[int],
) -> list[Sample]:
    """The samples with their rewards.

    Args:
        samples: of these prompts, in any order
        prompts: with distinct ids
        reward: fn(prompt, text, tokens) -> float, or its components by name; text is the decoded
            response without a stop token at its end (a stop string is part of it), tokens are all
            its ids
        decode: token ids -> text
        stop_ids: tokens that end a response

    Raises:
        RuntimeError: the reward function raised, exceeded its time limit, exited its process or
            returned something other than finite numbers; names the function, the prompt, the
            sample and the completion
    """
    by_id = {prompt.id: replace(prompt, images=()) for prompt in prompts}
    samples = list(samples)
    calls = list[tuple[Prompt, str, list[int]]]()
    for sample in samples:
        tokens = sample.response
        text = decode(tokens[:-1] if tokens[-1] in stop_ids else tokens)
        calls.append((by_id[sample.prompt_id], text, tokens))
    futures = list[Future[tuple[float, dict[str, float]]]]()
    if isinstance(reward, WorkerReward):
        futures = reward.pool.submit("score", calls, reward.timeout)
    scored: list[Sample] = []
    for number, (sample, call) in enumerate(zip(samples, calls, strict=True)):
        where = partial(_where, reward, sample, call[1])
        try:
            if isinstance(reward, WorkerReward):
                value, components = _wait(futures[number], where)
            else:
                value, components = _call(reward, call)
        except CallFailed as failure:
            text = f"{where()}: {failure.message}{_RULES.get(failure.reason, '')}"
            raise RuntimeError(text) from failure
        scored.append(replace(sample, reward=value, components=components))
    return scored


_RULES = {
    "error": ", expected a number",
    "timeout": ", expected one within data.reward_timeout",
    "lost": ", expected the function to return",
}


def _where(reward: Reward | WorkerReward, sample: Sample, text: str) -> str:
    completion = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    if isinstance(reward, WorkerReward):
        name = reward.name
    else:
        name = f"{reward.__module__}:{getattr(reward, '__qualname__', repr(reward))}"
    return (
        f"reward {name}(prompt {sample.prompt_id}, sample {sample.index}, completion {completion})"
    )


def _wait(
    future: Future[tuple[float, dict[str, float]]], where: Callable[[], str]
) -> tuple[float, dict[str, float]]:
    """The result of a call in a worker, whose calls before it have ended; a line on stderr names
    one that takes long."""
    waited = 0.0
    notice = NOTICE_SECONDS
    while True:
        try:
            return future.result(notice - waited)
        except TimeoutError:
            line = f"waiting for {where()}, which has run for {notice:.0f} s"
            print(line, file=sys.stderr, flush=True)
            waited = notice
            notice *= 2


def _call(
    reward: Reward, arguments: tuple[Prompt, str, list[int]]
) -> tuple[float, dict[str, float]]:
    """(reward, components) of a function of this process."""
    try:
        value = reward(*arguments)
    except Exception as error:
        raise CallFailed("error", f"raised {describe(error)}") from error
    return read_reward(value)


def read_reward(value: object) -> tuple[float, dict[str, float]]:
    """(reward, components) of what a reward function returned: a number without components, or the
    sum of a mapping's, or its entry `WHOLE` next to them.

    Raises: CallFailed for what is no finite number, or no name.
    """
    if not isinstance(value, Mapping):
        return _number(value, shown(value, _SHOWN)), {}
    values = dict(cast(Mapping[object, object], value))
    components = dict[str, float]()
    for name, component in values.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in TAKEN:
            rule = f"a name of letters, digits and _.- that is not {' or '.join(TAKEN)}"
            text = f"returned a component {shown(name, _SHOWN)}, expected {rule}"
            raise CallFailed("reward", text)
        components[str(name)] = _number(component, f"{shown(component, _SHOWN)} as {name}")
    if not components:
        raise CallFailed("reward", "returned no components, expected at least one")
    whole = components.pop(WHOLE) if WHOLE in components else sum(components.values())
    return _number(whole, f"components with the sum {whole}"), dict(sorted(components.items()))


def _number(value: object, what: str) -> float:
    if (number := finite(value)) is None:
        raise CallFailed("reward", f"returned {what}, expected a finite number")
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
