"""Environments that behave badly, each in one way, and good ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from typing import Any

from pyrl_ext.data.environment import Context, EnvironmentHost, StepResult
from pyrl_ext.prompt import Prompt


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
    return EnvironmentHost(Carried)


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


class RaisesInStep(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        raise KeyError("state")


class RaisesBase(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        raise BaseException("nothing catches me")


class Interrupts(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        raise KeyboardInterrupt


class Exits(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        sys.exit(0)


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


class Dies(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        os._exit(3)


class Waits(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        await asyncio.sleep(60)


class Forks(Good):
    """Its child process returns from the call as well."""

    def step(self, tokens: list[int], text: str) -> Any:
        if (child := os.fork()) > 0:
            os.waitpid(child, 0)
        return super().step(tokens, text)


class Prints(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        os.write(1, b"\x80\x05 is no message\n")
        return super().step(tokens, text)


class Nan(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return StepResult("ok", float("nan"), False)


class Infinite(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return StepResult("ok", float("inf"), True)


class RewardText(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return StepResult("ok", "1.0", True)  # type: ignore[arg-type]


class WrongTuple(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return "ok", 1.0


class ReturnsNone(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return None


class DoneText(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return "ok", 1.0, "yes"


class Empty(Good):
    observation = ""


class NoObservation(Good):
    observation = None


class ObservesNumber(Good):
    observation = 3.5


class ObservesTexts(Good):
    observation = ("ok",)


class UnknownToken(Good):
    observation = (5, 100_000)


class UnknownCharacter(Good):
    observation = "\N{SNOWMAN}"


class TooLong(Good):
    observation = "k" * 100


class Huge(Good):
    observation = "k" * 10_000_000


class NeverDone(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return "ok", 0.0, False


class Rewrites(Good):
    observation = Context([4, 4, 4, 4, 4])


class ChangesFolder(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        os.chdir("/")
        return super().step(tokens, text)


class ChangesHandler(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return super().step(tokens, text)


class LongPrompt(Good):
    def start(self, prompt: Prompt) -> Any:
        return Context([5] * 32)


class ClosesBadly(Good):
    def close(self) -> None:
        raise RuntimeError("container is gone")


class HugeInfo(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        return super().step(tokens, text)._replace(info=bytearray(100_000_000))


HOSTILE: dict[type[Good], str] = {
    RaisesInStart: "error",
    RaisesWhenMade: "error",
    RaisesInStep: "error",
    RaisesBase: "error",
    Interrupts: "error",
    Exits: "error",
    ExitsInTask: "timeout",
    Hangs: "timeout",
    HangsAsync: "timeout",
    Swallows: "timeout",
    Spins: "timeout",
    Nan: "reward",
    Infinite: "reward",
    RewardText: "reward",
    WrongTuple: "result",
    ReturnsNone: "result",
    DoneText: "result",
    Empty: "empty",
    NoObservation: "result",
    ObservesNumber: "result",
    ObservesTexts: "result",
    UnknownToken: "tokens",
    UnknownCharacter: "tokens",
    TooLong: "observation",
    Huge: "observation",
    NeverDone: "turns",
    Rewrites: "fork",
    ChangesHandler: "error",
    LongPrompt: "room",
}
"""Environment -> the reason for which its trajectories are dropped; its worker goes on."""

ENDS_WORKER: dict[type[Good], str] = {SpinsAsync: "timeout", Dies: "lost"}
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
