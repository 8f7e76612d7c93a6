"""Environments that behave badly, each in one way, and good ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pyrl_ext.data.environment import Context, EnvironmentHost, StepResult
from pyrl_ext.prompt import Prompt
from tests.helpers.user_rewards import changes_folder, forks, prints


class Carried:
    """The environment that ``prompt.meta["make"]`` makes."""

    def start(self, prompt: Prompt) -> Any:
        assert prompt.meta is not None
        inner = prompt.meta["make"]()
        self.step = inner.step
        if hasattr(inner, "close"):
            self.close = inner.close
        return inner.start(prompt)


def host() -> EnvironmentHost:
    """A host whose environments come with their prompts."""
    return EnvironmentHost({"": Carried})


class Good:
    """Answers two turns and is then done; the reward is the number of tokens it saw."""

    observation: Any = "ok"

    def __init__(self, turns: int = 2):
        self.turns = turns

    def start(self, prompt: Prompt) -> Any:
        return None

    def step(self, tokens: list[int], text: str) -> Any:
        self.turns -= 1
        return StepResult(self.observation, 1.0, self.turns == 0)


class GoodAsync(Good):
    """The same as coroutines."""

    async def start(self, prompt: Prompt) -> Any:
        await asyncio.sleep(0.01)

    async def step(self, tokens: list[int], text: str) -> Any:
        await asyncio.sleep(0.01)
        return super().step(tokens, text)


class RaisesInStart(Good):
    def start(self, prompt: Prompt) -> Any:
        raise ValueError("no such game")


class RaisesWhenMade(Good):
    def __init__(self):
        raise OSError("no container")


class Raises(Good):
    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def step(self, tokens: list[int], text: str) -> Any:
        raise self.error


class Interrupts(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        raise KeyboardInterrupt


class ExitsInTask(Good):
    """A task of its loop ends the loop's run; then the environment hangs."""

    async def step(self, tokens: list[int], text: str) -> Any:
        async def leave() -> None:
            sys.exit(0)

        task = asyncio.create_task(leave())
        await asyncio.sleep(60)
        return task


class Hangs(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        time.sleep(60)


class HangsAsync(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        await asyncio.sleep(60)


class Swallows(Good):
    """Goes on when it is cancelled."""

    async def step(self, tokens: list[int], text: str) -> Any:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


class Spins(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        while True:
            pass


class SpinsAsync(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        while True:
            pass


class Acts(Good):
    """Calls ``act`` before it answers."""

    def __init__(self, act: Callable[[], object]):
        super().__init__()
        self.act = act

    def step(self, tokens: list[int], text: str) -> Any:
        self.act()
        return super().step(tokens, text)


class Returns(Good):
    """Each turn has this result."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result

    def step(self, tokens: list[int], text: str) -> Any:
        return self.result


class Observes(Good):
    def __init__(self, observation: Any):
        super().__init__()
        self.observation = observation


class Huge(Good):
    observation = "k" * 10_000_000


class LongPrompt(Good):
    def start(self, prompt: Prompt) -> Any:
        return Context([5] * 32)


class ClosesBadly(Good):
    def close(self) -> None:
        raise RuntimeError("container is gone")


class HugeInfo(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return super().step(tokens, text)._replace(info=bytearray(100_000_000))


Make = Callable[[], Good]
GOOD: dict[str, Make] = {
    "Good": Good,
    "GoodAsync": GoodAsync,
    "ClosesBadly": ClosesBadly,
    "HugeInfo": HugeInfo,
    "ChangesFolder": partial(Acts, changes_folder),
    "Forks": partial(Acts, forks),
    "Prints": partial(Acts, prints),
}
"""Environments that are kept."""
HOSTILE: dict[str, tuple[Make, str]] = {
    "RaisesInStart": (RaisesInStart, "error"),
    "RaisesWhenMade": (RaisesWhenMade, "error"),
    "RaisesInStep": (partial(Raises, KeyError("state")), "error"),
    "RaisesBase": (partial(Raises, BaseException("nothing catches me")), "error"),
    "Interrupts": (Interrupts, "error"),
    "Exits": (partial(Raises, SystemExit(0)), "error"),
    "ExitsInTask": (ExitsInTask, "timeout"),
    "Hangs": (Hangs, "timeout"),
    "HangsAsync": (HangsAsync, "timeout"),
    "Swallows": (Swallows, "timeout"),
    "Spins": (Spins, "timeout"),
    "Nan": (partial(Returns, StepResult("ok", float("nan"), False)), "reward"),
    "Infinite": (partial(Returns, StepResult("ok", float("inf"), True)), "reward"),
    "RewardText": (partial(Returns, ("ok", "1.0", True)), "reward"),
    "WrongTuple": (partial(Returns, ("ok", 1.0)), "result"),
    "ReturnsNone": (partial(Returns, None), "result"),
    "DoneText": (partial(Returns, ("ok", 1.0, "yes")), "result"),
    "Empty": (partial(Observes, ""), "empty"),
    "NoObservation": (partial(Observes, None), "result"),
    "ObservesNumber": (partial(Observes, 3.5), "result"),
    "ObservesTexts": (partial(Observes, ("ok",)), "result"),
    "UnknownToken": (partial(Observes, (5, 100_000)), "tokens"),
    "UnknownCharacter": (partial(Observes, "\N{SNOWMAN}"), "tokens"),
    "TooLong": (partial(Observes, "k" * 100), "observation"),
    "Huge": (Huge, "observation"),
    "NeverDone": (partial(Returns, ("ok", 0.0, False)), "turns"),
    "Rewrites": (partial(Observes, Context([4, 4, 4, 4, 4])), "fork"),
    "ChangesHandler": (
        partial(Acts, partial(signal.signal, signal.SIGINT, signal.SIG_IGN)),
        "error",
    ),
    "LongPrompt": (LongPrompt, "room"),
}
"""Environments, and the reason for which their trajectories are dropped; their worker goes on."""
ENDS_WORKER: dict[str, tuple[Make, str]] = {
    "SpinsAsync": (SpinsAsync, "timeout"),
    "Dies": (partial(Acts, partial(os._exit, 3)), "lost"),
}
"""The same for environments whose worker is replaced."""


class FailsTwice(Good):
    """Its first calls fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 2

    def step(self, tokens: list[int], text: str) -> Any:
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("try again")
        return super().step(tokens, text)


class FailsTwiceAsync(FailsTwice):
    async def step(self, tokens: list[int], text: str) -> Any:
        return FailsTwice.step(self, tokens, text)


class Counting:
    """Answers with the number of the turn; done after ``turns``."""

    def __init__(self, turns: int = 3, observation: str = " {} ", begin: Any = None):
        self.turns = turns
        self.observation = observation
        self.begin = begin
        self.number = 0

    def start(self, prompt: Prompt) -> Any:
        return self.begin

    def step(self, tokens: list[int], text: str) -> Any:
        self.number += 1
        observation = self.observation.format(self.number)
        return StepResult(observation, self.number / 4, self.number == self.turns)


class Delayed(Counting):
    """Answers after a time that differs from call to call."""

    async def step(self, tokens: list[int], text: str) -> Any:
        await asyncio.sleep(random.SystemRandom().random() / 20)
        return super().step(tokens, text)


class Echoing(Counting):
    """Rewards a turn by a number that depends on what it is told."""

    def step(self, tokens: list[int], text: str) -> Any:
        return super().step(tokens, text)._replace(reward=float(told(tokens, text)))


def told(tokens: list[int], text: str) -> int:
    """A number that depends on all tokens and characters."""
    return sum(place * token for place, token in enumerate(tokens, 1)) + 1000 * sum(map(ord, text))


class Forking(Counting):
    """Rewrites the context after its first turn, and continues after its second."""

    def step(self, tokens: list[int], text: str) -> Any:
        result = super().step(tokens, text)
        if self.number == 1:
            return result._replace(observation=Context((9, 9, 9)))
        return result._replace(observation=Context((9, 9, 9, *tokens, 8)))


class Asks(Good):
    """Takes an option, and the tokenizer of the run."""

    def __init__(self, size: int, tokenizer: Any):
        super().__init__()
        self.size = size
        self.tokenizer = tokenizer
