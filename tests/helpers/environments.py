"""Environments that behave badly, each in one way, and good ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

from pyrl_ext.data.environment import Context, StepResult
from pyrl_ext.samples import Prompt

TOLD: list[str] = []  # what environments noticed, for tests


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
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                TOLD.append("cancelled")


class Spins(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        while True:
            pass


class SpinsAsync(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        while True:
            pass


class Blocks(Good):
    async def step(self, tokens: list[int], text: str) -> Any:
        time.sleep(4.5)  # longer than the time limit, shorter than two


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


class ChangesEnvironment(Good):
    def step(self, tokens: list[int], text: str) -> Any:
        os.environ["CUDA_VISIBLE_DEVICES"] = "7"
        return super().step(tokens, text)


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
    SpinsAsync: "blocked",
    Blocks: "blocked",
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
    ChangesEnvironment: "settings",
    ChangesFolder: "settings",
    ChangesHandler: "error",
    LongPrompt: "room",
}
"""Environment -> the reason for which its trajectories are dropped."""


class Asks(Good):
    """Takes an option, and the tokenizer of the run."""

    def __init__(self, size: int, tokenizer: Any):
        super().__init__()
        self.size = size
        self.tokenizer = tokenizer
