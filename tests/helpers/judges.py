"""Rewards that wait for each other, fail for a while, or end their worker; it imports no torch."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from pyrl_ext.prompt import Prompt
from tests.helpers.deadline import DEADLINE

_FOUR = asyncio.Barrier(4)
_ENDED: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
_inside = 0
_most = 0
_calls = Counter[int]()


async def _meet(prompt: Prompt) -> float:
    """Waits for three more calls; the most that ever ran at the same time."""
    global _inside, _most
    _inside += 1
    _most = max(_most, _inside)
    await _FOUR.wait()
    _inside -= 1
    return float(_most)


async def _end_after_the_next(prompt: Prompt) -> float:
    """Ends after the call of the next prompt; prompt 5 has none."""
    if prompt.id < 5:
        await _ENDED[prompt.id + 1].wait()
    _ENDED[prompt.id].set()
    return float(prompt.id)


async def _wait(prompt: Prompt) -> float:
    await asyncio.sleep(DEADLINE)
    return 0.0


async def _block(prompt: Prompt) -> float:
    time.sleep(DEADLINE)  # the mistake that a test is about
    return 0.0


async def _die(prompt: Prompt) -> float:
    os._exit(3)


async def _hang_up(prompt: Prompt) -> float:
    """Shuts the connection to the pool down, and does not end."""
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(file)) as one:
            one.shutdown(socket.SHUT_RDWR)
    time.sleep(DEADLINE)
    return 0.0


async def _process(prompt: Prompt) -> float:
    return float(os.getpid())


async def _linger(prompt: Prompt) -> float:
    """Ends in a later round of the event loop than the calls that begin with it."""
    for _ in range(100):
        await asyncio.sleep(0)
    return 1.0


JUDGES: dict[str, Callable[[Prompt], Awaitable[float]]] = {
    "meet": _meet,
    "end after the next": _end_after_the_next,
    "wait": _wait,
    "block": _block,
    "die": _die,
    "hang up": _hang_up,
    "process": _process,
    "linger": _linger,
}


async def judge(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """Do what the answer names."""
    return await JUDGES[prompt.answer](prompt)


def meets(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """Returns its process, once as many processes as the answer says have been in a folder."""
    processes, folder = prompt.answer
    (Path(folder) / str(os.getpid())).touch()
    end = time.monotonic() + DEADLINE
    while len(os.listdir(folder)) < processes:
        assert time.monotonic() < end
        time.sleep(0.01)
    return float(os.getpid())


def fails_for_a_while(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """Raises as often as the answer says."""
    _calls[prompt.id] += 1
    if _calls[prompt.id] <= prompt.answer:
        raise ConnectionError("no judge")
    return float(_calls[prompt.id])


def dies_once(prompt: Prompt, text: str, tokens: list[int]) -> float:
    """Ends its process if a file that the answer names is missing, and makes it."""
    path = Path(prompt.answer)
    if not path.exists():
        path.touch()
        os._exit(3)
    return 1.0
