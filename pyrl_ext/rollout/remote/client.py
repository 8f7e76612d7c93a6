"""A client of one engine's server: requests, and control calls, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from pyrl_ext.rollout.remote import protocol
from pyrl_ext.rollout.remote.guard import read_key
from pyrl_ext.rollout.remote.protocol import Answer, Partial, ProtocolError, Request

KEEP = 2.0  # a connection without a request is closed then; servers close theirs after 5 [s]
BUSY = 10  # request_timeout is so much longer for a server that generates for other requests
TOKEN_BYTES = 1024  # most of a token in an answer, and of a pair in its top log-probs
SHOWN = 300  # characters of a server's text in a message
GONE = (aiohttp.ClientError, OSError)  # of a connection, or what is no HTTP
WRONG = (400, 413, 422)  # the request itself is wrong: no server takes it
# where one fails another may come at once: vLLM's server ends the connection of a call that failed,
# without saying so
MAY_FAIL = (protocol.START, protocol.UPDATE, protocol.FINISH)
COUNTERS = (b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total")


class ServerFailed(RuntimeError):
    """A server that cannot be used; another one may take its requests.

    Attributes:
        keeps: tokens that it sent before are good
    """

    def __init__(self, reason: str, keeps: bool = False):
        super().__init__(reason)
        self.keeps = keeps


class Refused(RuntimeError):
    """A request that no server would take."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Secrets that servers ask for.

    Args:
        generate: for requests
        control: for everything else
    """

    generate: str | None = None
    control: str | None = None

    @classmethod
    def read(cls, folder: str | Path | None) -> Self:
        """The files generate and control of ``folder``; None: servers ask for none.

        Raises: ValueError for a key that is missing or short.
        """
        if folder is None:
            return cls()
        return cls(read_key(folder, "generate"), read_key(folder, "control"))


@dataclass(eq=False, slots=True)
class _Flight:
    """A request on its way: its task, when it last got a token, and what came of it."""

    task: asyncio.Task[Any] | None
    heard: float
    part: Partial


@dataclass(eq=False)
class Server:
    """One engine's server. All methods are for the thread of the event loop.

    Args:
        address: http://host:port
        keys: that it asks for
        silence: longest time without a token of a request [s]; ten times that while the server
            generates for others: it may hold more requests than it runs at once
        row_bytes: most bytes of a token's routes in an answer

    Attributes:
        failure: why the server is not used; None: it is
        joined: the last publish gave it weights, and it has not failed since
        paused: it may be silent for as long as it wants, while weights are published
    """

    address: str
    keys: Keys = field(default_factory=Keys)
    silence: float = 120.0
    row_bytes: int = 0
    failure: ServerFailed | None = None
    joined: bool = False
    paused: bool = False
    _flights: dict[_Flight, None] = field(default_factory=dict[_Flight, None], repr=False)
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)
    _watch: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def alive(self) -> bool:
        """True if the server is used."""
        return self.failure is None

    @property
    def reason(self) -> str | None:
        """Why the server is not used; None: it is."""
        return None if self.failure is None else str(self.failure)

    def fail(self, reason: str, keeps: bool = False) -> None:
        """Take the server out of use; all its requests end with `ServerFailed`."""
        if self.failure is not None:
            return
        self.failure = ServerFailed(reason, keeps)
        self.joined = False
        for flight in self._flights:
            if flight.task is not None:
                flight.task.cancel()

    async def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.cancel()
        if self._session is not None:
            await self._session.close()

    async def healthy(self, within: float = 5.0) -> bool:
        """True if it answers on /health."""
        try:
            await self._get(protocol.HEALTH, within)
        except ServerFailed:
            return False
        return True

    async def control(
        self, path: str, body: Any = None, timeout: float = 60.0, method: str = "POST"
    ) -> dict[str, Any]:
        """The JSON that a control call answers; {}: nothing.

        Args:
            path: with its query
            timeout: for the whole call [s]

        Raises: ServerFailed for an error, an answer that says no, or none in time.
        """
        where = f"{self.address}{path}"
        try:
            async with asyncio.timeout(timeout), self._call(method, path, body) as reply:
                text = await _text(reply, protocol.MAX_BODY)
                if reply.status != 200:
                    shown = text.decode(errors="replace")[:SHOWN]
                    raise ServerFailed(f"{where}: {reply.status} {shown}")
        except TimeoutError:
            raise ServerFailed(f"{where}: no answer within {timeout:g} s") from None
        except GONE as error:
            raise ServerFailed(f"{where}: {error!r}, expected 200") from error
        try:
            found = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            raise ServerFailed(f"{where}: {text[:SHOWN]!r}, expected JSON") from None
        found = found if isinstance(found, dict) else {"value": found}
        if found.get("error") is not None or found.get("success") is False:
            raise ServerFailed(f"{where}: {str(found)[:SHOWN]}, expected success")
        return found

    async def generate(self, request: Request, part: Partial) -> Answer:
        """Send a request; its tokens are in ``part`` as they come, also when the server dies.

        A connection that the server closed before it answered anything is tried once more: that
        happens to a connection that was kept too long.

        Raises: ServerFailed when the server died, was taken out, sent no token in time or what
            breaks the protocol; Refused.
        """
        loop = asyncio.get_running_loop()
        flight = _Flight(asyncio.current_task(), loop.time(), part)
        if self._watch is None:
            self._watch = loop.create_task(self._watched())
        self._flights[flight] = None
        try:
            if self.failure is not None:
                raise ServerFailed(str(self.failure), self.failure.keeps)
            try:
                return await self._generate(request, flight)
            except aiohttp.ServerDisconnectedError as error:
                if part.token_ids or not await self.healthy():
                    raise self._ended(error, part) from error
                return await self._generate(request, flight)
        except GONE as error:
            raise self._ended(error, part) from error
        except ProtocolError as error:
            raise ServerFailed(f"{self.address}{protocol.GENERATE}: {error}") from error
        except asyncio.CancelledError:
            if self.failure is None or (flight.task is not None and flight.task.uncancel()):
                raise
            raise ServerFailed(str(self.failure), self.failure.keeps) from None
        finally:
            del self._flights[flight]

    async def _generate(self, request: Request, flight: _Flight) -> Answer:
        part = flight.part
        where = f"{self.address}{protocol.GENERATE}"
        loop = asyncio.get_running_loop()
        async with self._call("POST", protocol.GENERATE, request.to_json()) as reply:
            if reply.status != 200:
                text = f"{reply.status} {(await _text(reply, 1 << 16)).decode(errors='replace')}"
                if reply.status in WRONG:
                    raise Refused(f"{where}: {text[:SHOWN]}, expected it to take the request")
                raise ServerFailed(f"{where}: {text[:SHOWN]}, expected 200")
            rows = len(request.token_ids) + request.max_tokens - request.routes_from
            limit = (1 << 16) + request.max_tokens * TOKEN_BYTES * (1 + request.top)
            before = 0
            async for message in _events(reply, limit + rows * self.row_bytes):
                try:
                    body = json.loads(message)
                except (ValueError, RecursionError):
                    raise ProtocolError(
                        f"{protocol.GENERATE}: {message[:SHOWN]!r}, not JSON"
                    ) from None
                part.add(body)
                if len(part.token_ids) > before:
                    before = len(part.token_ids)
                    flight.heard = loop.time()
        return part.answer()

    def _ended(self, error: BaseException, part: Partial) -> ServerFailed:
        where = f"{self.address}{protocol.GENERATE}"
        count = len(part.token_ids)
        return ServerFailed(f"{where}: the connection ended after {count} tokens, {error!r}", True)

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False
            )
        key = self.keys.generate if path == protocol.GENERATE else self.keys.control
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        if path in MAY_FAIL:
            headers["Connection"] = "close"
        given = {} if body is None else {"json": body}
        async with self._session.request(
            method, self.address + path, headers=headers, allow_redirects=False, **given
        ) as reply:
            yield reply

    async def _get(self, path: str, within: float) -> bytes:
        """Raises: ServerFailed."""
        try:
            async with asyncio.timeout(within), self._call("GET", path, None) as reply:
                if reply.status == 200:
                    return await _text(reply, protocol.MAX_BODY)
                raise ServerFailed(f"{self.address}{path}: {reply.status}, expected 200")
        except (TimeoutError, *GONE) as error:
            raise ServerFailed(f"{self.address}{path}: {error!r}, expected 200") from error

    async def _watched(self) -> None:
        """Fails the server when a request gets no token for too long."""
        loop = asyncio.get_running_loop()
        pause = self.silence / 8
        moved = 0.0
        before = b""
        last = loop.time()
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            if self.paused or now - last > 2 * pause:  # or this process slept
                for flight in self._flights:
                    flight.heard = now
            last = now
            silent = [f for f in self._flights if now - f.heard > self.silence / 2]
            if not silent or not self.alive:
                before = b""
                continue
            with suppress(ServerFailed):  # a server without counters cannot show that it is busy
                count = await self._count()
                if before and count != before:
                    moved = now
                before = count
            most = self.silence * (BUSY if now - moved < self.silence else 1)
            last = loop.time()
            for flight in silent:
                if last - flight.heard > most and flight in self._flights and not self.paused:
                    got = len(flight.part.token_ids)
                    silent = f"no token for {most:g} s, after {got} of a request"
                    self.fail(f"{self.address}{protocol.GENERATE}: {silent}", keeps=True)
                    break

    async def _count(self) -> bytes:
        """Number of tokens it has read and generated, as it says."""
        lines = (await self._get(protocol.METRICS, self.silence / 4)).splitlines()
        return b" ".join(line for line in lines if line.startswith(COUNTERS))


async def _text(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body. Raises: ServerFailed when it is longer than ``limit``."""
    text = bytearray()
    async for chunk in reply.content.iter_any():
        text += chunk
        if len(text) > limit:
            raise ServerFailed(f"{reply.url}: more than {limit:,} bytes, expected at most that")
    return bytes(text)


async def _events(reply: aiohttp.ClientResponse, limit: int) -> AsyncIterator[bytes]:
    """The messages of a stream of server-sent events.

    Raises: ProtocolError when no [DONE] ends them, or they have more than ``limit`` bytes.
    """
    waiting = bytearray()
    seen = 0
    size = 0
    async for chunk in reply.content.iter_any():
        waiting += chunk
        size += len(chunk)
        if size > limit:
            raise ProtocolError(f"an answer of more than {limit:,} bytes, expected at most that")
        while (end := waiting.find(b"\n\n", seen)) >= 0:
            message = bytes(waiting[:end])
            del waiting[: end + 2]
            seen = 0
            if message == b"data: [DONE]":
                return
            if message.startswith(b"data: "):
                yield message[6:]
        seen = max(len(waiting) - 1, 0)
    raise ProtocolError(f"{reply.url}: the stream ended, expected [DONE] before")
