"""Embedded engines' servers in this process, and calls to them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.auth import Guard, Keys
from pyrl_ext.rollout.remote.embedded import EmbeddedServer
from pyrl_ext.rollout.remote.protocol import GENERATE, Answer, Partial, Request

NO_KEYS = Keys()


def free_port() -> int:
    """A port of loopback for a server that starts soon."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


class Gate:
    """Holds an engine's forwards; `allow` lets some of them run."""

    def __init__(self, engine: HFEngine):
        self._free = threading.Semaphore(0)
        self.waits = threading.Event()
        self._open = False
        engine.model.register_forward_pre_hook(self._pass)

    def _pass(self, *_: object) -> None:
        if not self._open and not self._free.acquire(blocking=False):
            self.waits.set()
            self._free.acquire()

    async def allow(self, forwards: int) -> None:
        """Returns once the engine waits in the forward after these."""
        self.waits.clear()
        self.release(forwards)
        assert await asyncio.to_thread(self.waits.wait, 30)

    def release(self, forwards: int) -> None:
        for _ in range(forwards):
            self._free.release()

    def open(self) -> None:
        self._open = True
        self._free.release()


class Client:
    """Calls of one server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, server: EmbeddedServer):
        self.http = http
        self.url = url
        self.server = server

    async def generate(self, request: Request) -> Answer:
        async with self.http.post(self.url + GENERATE, json=request.to_json()) as reply:
            assert reply.status == 200, (reply.status, await reply.text())
            part = Partial(request)
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    part.add(line[6:])
            return part.answer()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body or {}) as reply:
            return reply.status, await reply.json(content_type=None)

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as reply:
            return reply.status, await reply.text()

    async def blocked(self, calls: int) -> None:
        """Returns once the engine's thread has so many calls to make."""
        while self.server.worker._calls.qsize() < calls:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def served(
    engine: HFEngine,
    max_tokens: int = 100,
    keys: Keys = NO_KEYS,
    kind: Callable[[HFEngine, int], EmbeddedServer] = EmbeddedServer,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Client]:
    """The engine behind HTTP, or HTTPS, on a port that the kernel chooses."""
    server = kind(engine, max_tokens)
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()
    async with server.listens(listening, Guard(keys), tls):
        server.worker.start()
        async with aiohttp.ClientSession() as http:
            scheme = "http" if tls is None else "https"
            yield Client(http, f"{scheme}://{host}:{port}", server)
        server.worker.stop()


@contextmanager
def running(
    engine: HFEngine,
    max_tokens: int = 100,
    kind: Callable[[HFEngine, int], EmbeddedServer] = EmbeddedServer,
    keys: Keys = NO_KEYS,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Client]:
    """`served`, with its loop in another thread, for tests that are not asynchronous."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = served(engine, max_tokens, keys, kind, tls)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
    finally:
        end = context.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(end, loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
