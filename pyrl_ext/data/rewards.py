"""Reward functions: two common ones, those of users in a worker process, and their calls."""

from __future__ import annotations

import inspect
import math
import numbers
import re
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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


class Scored(NamedTuple):
    """The result of a call of a reward function.

    Args:
        reward: of the response
        components: by name, those that the function returned
        seconds: that the call took
    """

    reward: float
    components: dict[str, float]
    seconds: float


class RewardHost:
    """A user's reward function in a worker process.

    Args:
        name: module:function
        at_once: calls of an ``async def`` function that run at the same time
    """

    def __init__(self, name: str, at_once: int):
        self._reward = load_function("data.reward", name, 3)
        self.about, self._holds = getattr(self._reward, "answer_rule", (None, bool))
        self.at_once: int | None = at_once if inspect.iscoroutinefunction(self._reward) else 1

    def call(self, owner: int | None, method: str, *args: Any) -> Any:
        """(what the function returned, seconds), or the check of an answer."""
        if method == "holds":
            return self._holds(*args)
        began = time.monotonic()
        value = self._reward(*args)
        if inspect.isawaitable(value):
            return _timed(value, began)
        return value, time.monotonic() - began

    def read(self, method: str, value: Any) -> Any:
        """`Scored`, or whether an answer can be used."""
        if method == "holds":
            return bool(value)
        returned, seconds = value
        return Scored(*read_reward(returned), seconds)


async def _timed(awaitable: Awaitable[Any], began: float) -> tuple[Any, float]:
    value = await awaitable
    return value, time.monotonic() - began


class WorkerReward:
    """A user's reward function, which runs in worker processes.

    Args:
        name: module:function
        timeout: of a call [s]; None: no limit
        workers: most processes
        concurrency: calls of an ``async def`` function that a process runs at the same time
        retries: of a call that fails
        drops: a response whose calls all fail is dropped and counted; else it ends the run

    Attributes:
        noted: kinds of failures whose first one was printed

    Raises:
        ValueError: it does not load
    """

    def __init__(
        self,
        name: str,
        timeout: float | None = None,
        workers: int = 1,
        concurrency: int = 1,
        retries: int = 0,
        drops: bool = False,
    ):
        self.name = name
        self.timeout = timeout
        self.retries = retries
        self.drops = drops
        self.noted: set[str] = set()
        self.pool = Pool(f"data.reward: {name!r}", partial(RewardHost, name, concurrency), workers)
        if self.pool.about is not None:
            self.answer_rule = self.pool.about, self._holds

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()

    def _holds(self, answer: Any) -> bool:
        return self.pool.submit("holds", [(answer,)], None)[0].result()


BUILT_IN: dict[str, Reward] = {
    f"{__name__}:{function.__name__}": function for function in (exact_match, number_match)
}
"""Rewards that run in the process that scores."""


def load_reward(name: str, **limits: Any) -> Reward | WorkerReward:
    """The reward function that ``data.reward`` names; ``limits``: as `WorkerReward` takes them.

    Raises:
        ValueError: it does not load
    """
    name = reward_function(name)
    return BUILT_IN[name] if name in BUILT_IN else WorkerReward(name, **limits)


Arguments = tuple[Prompt, str, list[int]]


class _Call:
    """A call of a reward function in a worker, which is made again if it fails.

    Attributes:
        reward: the function
        text: of the response
        done: its result, or the last failure
        retries: calls after the first one
        ended: when it was done, on the monotonic clock [s]
    """

    def __init__(self, reward: WorkerReward, arguments: Arguments):
        self.text = arguments[1]
        self.done = Future[Scored]()
        self.retries = 0
        self.ended = 0.0
        self.reward = reward
        self._arguments = arguments

    def follow(self, future: Future[Scored]) -> None:
        """Take the result of a future when it is there."""
        future.add_done_callback(self._take)

    def _take(self, future: Future[Scored]) -> None:
        """Runs in the thread of the pool."""
        failure = future.exception()
        if failure is not None and self.retries < self.reward.retries:
            self.retries += 1
            try:
                (again,) = self.reward.pool.submit("score", [self._arguments], self.reward.timeout)
            except Exception as error:  # no process could be started; who waits has to know
                self.done.set_exception(error)
                return
            self.follow(again)
            return
        self.ended = time.monotonic()
        if failure is None:
            self.done.set_result(future.result())
        else:
            self.done.set_exception(failure)


class Scorer:
    """Scores the samples of a rollout, group by group.

    Args:
        prompts: with distinct ids
        reward: fn(prompt, text, tokens) -> float, or its components by name; text is the decoded
            response without a stop token at its end (a stop string is part of it), tokens are all
            its ids. Or the function of each source of prompts. None: samples keep the reward that
            an environment or an agent gave
        decode: token ids -> text
        stop_ids: tokens that end a response
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        reward: Reward | WorkerReward | Mapping[str, Reward | WorkerReward | None] | None,
        decode: Callable[[list[int]], str],
        stop_ids: Sequence[int],
    ):
        rewards = reward if isinstance(reward, Mapping) else {p.source: reward for p in prompts}
        self._rewards: Mapping[str, Reward | WorkerReward | None] = rewards
        self._by_id = {prompt.id: replace(prompt, images=()) for prompt in prompts}
        self._decode = decode
        self._stop_ids = stop_ids
        self._busy_until = 0.0
        self._running: list[tuple[Sample, _Call]] = []  # calls that no one has seen an end of

    def __call__(
        self, samples: Sequence[Sample]
    ) -> Callable[[defaultdict[str, float]], list[Sample]]:
        """Begin to score samples: a function in workers is called at once, a built-in one later.

        Args:
            samples: of prompts of one source

        Returns:
            a function that waits, adds to the counts that it is given, and returns the samples
            with their rewards, in their order; without those that are dropped. It raises
            RuntimeError if the reward function raised, exceeded its time limit, exited its
            process or returned something other than finite numbers; it names the function, the
            prompt, the sample and the completion

        Raises:
            RuntimeError: the same, of an earlier call
        """
        reward = self._rewards[self._by_id[samples[0].prompt_id].source]
        if reward is None:
            return lambda _counts: list(samples)
        arguments = list[Arguments]()
        for sample in samples:
            tokens = sample.response
            text = self._decode(tokens[:-1] if tokens[-1] in self._stop_ids else tokens)
            arguments.append((self._by_id[sample.prompt_id], text, tokens))
        if not isinstance(reward, WorkerReward):
            return partial(self._score_here, reward, samples, arguments)
        self._check_running()
        calls = [_Call(reward, each) for each in arguments]
        self._running += zip(samples, calls, strict=True)
        began = time.monotonic()
        futures = reward.pool.submit("score", arguments, reward.timeout)
        for call, future in zip(calls, futures, strict=True):
            call.follow(future)
        return partial(self._wait, reward, samples, calls, began)

    def _check_running(self) -> None:
        """Raise the error of a call that has failed, rather than generate the rest of the step."""
        running: list[tuple[Sample, _Call]] = []
        for sample, call in self._running:
            if not call.done.done():
                running.append((sample, call))
                continue
            failure = call.done.exception()
            if isinstance(failure, CallFailed) and not call.reward.drops:
                raise _failed(call.reward, sample, call.text, failure) from failure
        self._running = running

    def _score_here(
        self,
        reward: Reward,
        samples: Sequence[Sample],
        arguments: Sequence[Arguments],
        counts: defaultdict[str, float],
    ) -> list[Sample]:
        scored: list[Sample] = []
        for sample, each in zip(samples, arguments, strict=True):
            try:
                value, components = _call(reward, each)
            except CallFailed as failure:
                raise _failed(reward, sample, each[1], failure) from failure
            scored.append(replace(sample, reward=value, components=components))
        return scored

    def _wait(
        self,
        reward: WorkerReward,
        samples: Sequence[Sample],
        calls: Sequence[_Call],
        began: float,
        counts: defaultdict[str, float],
    ) -> list[Sample]:
        """Groups are waited for in the order in which they began."""
        waits = time.monotonic()
        scored: list[Sample] = []
        for sample, call in zip(samples, calls, strict=True):
            try:
                result = _result(call.done, partial(_where, reward, sample, call.text))
            except CallFailed as failure:
                error = _failed(reward, sample, call.text, failure)
                if not reward.drops:
                    raise error from failure
                _note(reward, failure, error)
                counts[f"dropped/{failure.reason}"] += 1
            else:
                scored.append(replace(sample, reward=result.reward, components=result.components))
                counts["reward_results"] += 1
                counts["reward_seconds"] += result.seconds
            counts["responses"] += 1
            counts["reward_retries"] += call.retries
        counts["max_reward_wait"] += time.monotonic() - waits
        ended = max(call.ended for call in calls)
        counts["max_reward_busy"] += max(0.0, ended - max(began, self._busy_until))
        self._busy_until = max(self._busy_until, ended)
        return scored


_RULES = {
    "error": ", expected a number",
    "timeout": ", expected one within data.reward_timeout",
    "lost": ", expected the function to return",
}


def _failed(
    reward: Reward | WorkerReward, sample: Sample, text: str, failure: CallFailed
) -> RuntimeError:
    """The error that names a failed call."""
    rule = _RULES.get(failure.reason, "")
    return RuntimeError(f"{_where(reward, sample, text)}: {failure.message}{rule}")


def _note(reward: WorkerReward, failure: CallFailed, error: RuntimeError) -> None:
    """Print the first failure of its kind."""
    if failure.reason not in reward.noted:
        reward.noted.add(failure.reason)
        print(f"{error}; the response is dropped", file=sys.stderr, flush=True)


def _where(reward: Reward | WorkerReward, sample: Sample, text: str) -> str:
    completion = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    if isinstance(reward, WorkerReward):
        name = reward.name
    else:
        name = f"{reward.__module__}:{getattr(reward, '__qualname__', repr(reward))}"
    return (
        f"reward {name}(prompt {sample.prompt_id}, sample {sample.index}, completion {completion})"
    )


def _result(future: Future[Scored], where: Callable[[], str]) -> Scored:
    """The result of a call in a worker, whose calls before it have ended; a line on stderr names
    one that takes long."""
    waited = 0.0
    notice = NOTICE_SECONDS
    while True:
        try:
            return future.result(notice - waited)
        except TimeoutError:
            line = f"waiting for {where()} for {notice:.0f} s so far"
            print(line, file=sys.stderr, flush=True)
            waited = notice
            notice *= 2


def _call(reward: Reward, arguments: Arguments) -> tuple[float, dict[str, float]]:
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
