"""Agents of a user, good and hostile; workers import this module, so it imports no torch."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

from pyrl_ext.prompt import Prompt
from tests.helpers.deadline import DEADLINE

_FOUR = threading.Barrier(4)


async def _asks(client: AsyncOpenAI, prompt: Prompt) -> Any:
    """The number of capital letters in two answers."""
    total = 0
    for _ in range(2):
        total += _capitals(
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": prompt.text}]
            )
        )
    return total


async def _raises(client: AsyncOpenAI, prompt: Prompt) -> Any:
    raise KeyError("no tool")


async def _exits(client: AsyncOpenAI, prompt: Prompt) -> Any:
    sys.exit(3)


async def _cancels_itself(client: AsyncOpenAI, prompt: Prompt) -> Any:
    raise asyncio.CancelledError


async def _blocks(client: AsyncOpenAI, prompt: Prompt) -> Any:
    """Begins with a file, and never ends."""
    _touch(prompt)
    time.sleep(DEADLINE)  # the mistake that a test is about


async def _waits(client: AsyncOpenAI, prompt: Prompt) -> Any:
    _touch(prompt)
    await asyncio.sleep(DEADLINE)


async def _meets(client: AsyncOpenAI, prompt: Prompt) -> Any:
    """Blocks its event loop until three more have come."""
    _FOUR.wait(DEADLINE)
    return 1


async def _leaves_a_task(client: AsyncOpenAI, prompt: Prompt) -> Any:
    """It leaves a file when it is cancelled."""

    async def lingers() -> None:
        try:
            await asyncio.sleep(DEADLINE)
        except asyncio.CancelledError:
            _touch(prompt)

    task = asyncio.create_task(lingers())
    await asyncio.sleep(0)
    return float(task.done())


async def _until_a_file(client: AsyncOpenAI, prompt: Prompt) -> Any:
    """Ends when a file is there."""
    while not Path(str(prompt.meta and prompt.meta["path"])).exists():
        await asyncio.sleep(0.01)
    return os.getpid()


async def _about(client: AsyncOpenAI, prompt: Prompt) -> Any:
    """Facts about the worker and the client."""
    return {
        "process": os.getpid(),
        "torch": "torch" in sys.modules,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "retries": client.max_retries,
        "limited": client.timeout is not None,
    }


async def _returns(client: AsyncOpenAI, prompt: Prompt) -> Any:
    assert prompt.meta is not None
    return prompt.meta["value"]


AGENTS: dict[str, Callable[[AsyncOpenAI, Prompt], Awaitable[Any]]] = {
    "ask": _asks,
    "raise": _raises,
    "exit": _exits,
    "cancel itself": _cancels_itself,
    "block": _blocks,
    "wait": _waits,
    "meet": _meets,
    "leave a task": _leaves_a_task,
    "until a file": _until_a_file,
    "about": _about,
    "return": _returns,
}


async def agent(client: AsyncOpenAI, prompt: Prompt) -> Any:
    """Do what the answer names."""
    return await AGENTS[prompt.answer](client, prompt)


async def scaled(client: AsyncOpenAI, prompt: Prompt, *, scale: float, plus: float = 0.0) -> Any:
    return scale * await _asks(client, prompt) + plus


def asks(client: OpenAI, prompt: Prompt) -> Any:
    """As the coroutine, in an ordinary function."""
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": prompt.text}]
    )
    return _capitals(answer)


def asks_forever(client: OpenAI, prompt: Prompt) -> Any:
    while True:
        asks(client, prompt)
        _touch(prompt)


def wraps(client: Any, prompt: Prompt) -> Any:
    """An ordinary function that returns a coroutine."""
    return agent(client, prompt)


def takes_one(client: Any) -> float:
    return 1.0


def judge(prompt: Prompt, calls: list[dict[str, Any]]) -> Any:
    return {"calls": len(calls), "end": calls[-1]["reply"]["content"] == prompt.answer}


async def judge_async(prompt: Prompt, calls: list[dict[str, Any]]) -> Any:
    await asyncio.sleep(0)
    return judge(prompt, calls)


def judges_nothing(prompt: Prompt, calls: list[dict[str, Any]]) -> Any:
    return None


def _touch(prompt: Prompt) -> None:
    assert prompt.meta is not None
    Path(prompt.meta["path"]).touch()


def _capitals(answer: Any) -> int:
    text: str = answer.choices[0].message.content
    return sum(letter.isupper() for letter in text)
