"""One open stream of requests: between the caller's thread and that of the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Sequence
from select import POLLIN, poll

from pyrl_ext.rollout.remote.parts import Parts
from pyrl_ext.rollout.remote.protocol import Request
from pyrl_ext.rollout.remote.router import Router
from pyrl_ext.samples import Sample, Turn

Key = tuple[int, int]  # of a trajectory: prompt id and index


class Stream:
    """Sends requests, and hands out their responses as they come.

    Args:
        router: runs in ``loop``

    Attributes:
        left: turns without a response, by the number of each
        prompts: ids of the prompts that were asked for
        before: conversation -> its last turn
        reused: (prompt id, index, number) of a turn without a response -> the turn whose routes are
            its first; a conversation may have several, of which the agent gave up all but one
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, router: Router):
        self.loop = loop
        self.router = router
        self.left: dict[int, Turn] = {}
        self.prompts: set[int] = set()
        self.before: dict[Key, Sample] = {}
        self.reused: dict[tuple[int, int, int], Sample] = {}
        self._asked = 0
        self._done: deque[tuple[int, Parts | Exception]] = deque()
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._closed = False  # guarded: nothing writes to a file of that number afterwards

    def send(self, asked: Sequence[tuple[Turn, Request]]) -> None:
        """Ask for these turns."""
        numbered = dict(enumerate(asked, self._asked))
        self._asked += len(numbered)
        self.left |= {number: turn for number, (turn, _) in numbered.items()}
        self.prompts |= {turn.prompt.id for turn, _ in asked}
        requests = [(n, turn.prompt.id, request) for n, (turn, request) in numbered.items()]
        self.loop.call_soon_threadsafe(self._send, requests)

    def _send(self, requests: Sequence[tuple[int, int, Request]]) -> None:
        for number, prompt, request in requests:
            task = self.loop.create_task(self._answer(number, prompt, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, prompt: int, request: Request) -> None:
        try:
            result = await self.router.answer((id(self), prompt), request)
        except Exception as error:
            result = error
        self._put(number, result)

    def _put(self, number: int, result: Parts | Exception) -> None:
        with self._lock:
            if not self._closed:
                self._done.append((number, result))
                os.eventfd_write(self._file, 1)

    def wait(self, other: int | None) -> None:
        """Return when a response is there, or the file ``other`` can be read."""
        files = poll()
        for file in (self._file, other):
            if file is not None:
                files.register(file, POLLIN)
        files.poll()

    def taken(self) -> list[tuple[Turn, Parts]]:
        """The responses that came since the last call. Raises: the error that ended one."""
        try:
            os.eventfd_read(self._file)
        except BlockingIOError:
            return []
        responses: list[tuple[Turn, Parts]] = []
        while self._done:
            number, result = self._done.popleft()
            if isinstance(result, Exception):
                raise result
            responses.append((self.left.pop(number), result))
        return responses

    def fail(self, error: Exception) -> None:
        """Have `taken` raise an error."""
        self._put(-1, error)

    def close(self) -> None:
        """Give up what still runs; servers see its connections close."""
        with self._lock:
            self._closed = True
            os.close(self._file)
        self.loop.call_soon_threadsafe(self._give_up)  # never runs once the engine is closed

    def _give_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.router.forget([(id(self), prompt) for prompt in self.prompts])
