"""A client of one engine's server: requests, and control calls, over HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pyrl_ext.parallel.ports import tls_fault
from pyrl_ext.rollout.remote import auth, protocol
from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.cuts import CUT_S, is_cut, reached_soon
from pyrl_ext.rollout.remote.protocol import Answer, Partial, Request

BUSY = 10  # request_timeout is so much longer for a server that generates for other requests
UNPROVEN_S = 1.0  # longest time for the text of an answer that is refused [s]
SHOWN = 300  # characters of a server's text in a message
GONE = (aiohttp.ClientError, OSError)  # of a connection, or what is no HTTP
WRONG = (400, 413, 422)  # the request itself is wrong: no server takes it
COUNTERS = (b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total")


class ServerFailed(RuntimeError):
    """A server that cannot be used; another one may take its requests.

    Attributes:
        keeps: tokens that it sent before are good
    """

    def __init__(self, reason: str, keeps: bool = False):
        super().__init__(reason)
        self.keeps = keeps


class NotReached(ServerFailed):
    """A server whose host could not be reached; it got nothing of the call."""


class Refused(RuntimeError):
    """A request that no server would take."""


@dataclass(eq=False, slots=True)
class _Flight:
    """A running request: its task, the time of its last token, and its tokens."""

    task: asyncio.Task[Any] | None
    heard: float
    part: Partial


@dataclass(eq=False)
class Server:
    """One engine's server. All methods are for the thread of the event loop.

    Args:
        address: http://host:port, or https:// with ``tls``
        keys: that it asks for; they are not sent, see `auth`
        bearer: a key that is sent as it is, to a server of other programs; None: there is none
        silence: longest time without a token of a request [s]; ten times that while the server
            generates for others: it may hold more requests than it runs at once
        patience: longest time in which a call is made again, since the network is cut [s]
        tls: of its connections; None: they are not encrypted

    Attributes:
        failure: why the server is not used; None: it is
        paused: it may be silent for as long as it wants, while weights are published
    """

    address: str
    keys: Keys = field(default_factory=Keys)
    silence: float = 120.0
    patience: float = CUT_S
    tls: ssl.SSLContext | None = None
    bearer: str | None = None
    failure: ServerFailed | None = None
    paused: bool = False
    _flights: set[_Flight] = field(default_factory=set[_Flight], repr=False)
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)
    _watch: asyncio.Task[None] | None = field(default=None, repr=False)
    _number: str | None = field(default=None, repr=False)  # of its process; None: not proven
    _proving: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def reason(self) -> str | None:
        """Why the server is not used; None: it is."""
        return None if self.failure is None else str(self.failure)

    def fail(self, reason: str, keeps: bool = False) -> None:
        """Take the server out of use; all its requests end with `ServerFailed`."""
        if self.failure is not None:
            return
        self.failure = ServerFailed(reason, keeps)
        self._number = None  # another program may take its port
        for flight in self._flights:
            if flight.task is not None:
                flight.task.cancel()

    async def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.cancel()
        if self._session is not None:
            await self._session.close()

    async def control(
        self, path: str, body: Any = None, timeout: float = 60.0, method: str = "POST"
    ) -> dict[str, Any]:
        """The JSON that a control call answers; {}: nothing.

        Args:
            path: with its query
            timeout: for the whole call [s]

        Raises: ServerFailed for an error, an answer that says no, or none in time.
        """
        text = await self._fetch(method, path, body, timeout)
        try:
            answer = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            raise ServerFailed(f"{self.address}{path}: {text[:SHOWN]!r}, expected JSON") from None
        answer = answer if isinstance(answer, dict) else {"value": answer}
        if answer.get("error") is not None or answer.get("success") is False:
            raise ServerFailed(f"{self.address}{path}: {str(answer)[:SHOWN]}, expected success")
        return answer

    async def generate(self, request: Request, part: Partial) -> Answer:
        """Send a request; its tokens are in ``part`` as they come, also when the server dies.

        Raises: ServerFailed when the server died, was taken out, sent no token in time or what
            breaks the protocol; Refused.
        """
        where = f"{self.address}{protocol.GENERATE}"
        loop = asyncio.get_running_loop()
        flight = _Flight(asyncio.current_task(), loop.time(), part)
        if self._watch is None:
            self._watch = loop.create_task(self._watched())
        self._flights.add(flight)
        try:
            if self.failure is not None:
                raise ServerFailed(str(self.failure), self.failure.keeps)
            return await self._generate(request, flight)
        except GONE as error:
            count = len(part.token_ids)
            text = f"{where}: the connection ended after {count} tokens{_why(error)}"
            raise ServerFailed(text, keeps=True) from error
        except ValueError as error:  # also a line that is too long
            raise ServerFailed(f"{where}: {error}") from error
        except asyncio.CancelledError:
            if self.failure is None or (flight.task is not None and flight.task.uncancel()):
                raise
            raise ServerFailed(str(self.failure), self.failure.keeps) from None
        finally:
            self._flights.discard(flight)

    async def _generate(self, request: Request, flight: _Flight) -> Answer:
        part = flight.part
        loop = asyncio.get_running_loop()
        async with self._reply("POST", protocol.GENERATE, request.to_json()) as reply:
            if reply.status != 200:
                text = f"{reply.url}: {reply.status} {(await reply.text(errors='replace'))[:SHOWN]}"
                if reply.status in WRONG:
                    raise Refused(f"{text}, expected it to take the request")
                raise ServerFailed(f"{text}, expected 200")
            async for line in reply.content:
                if line.startswith(b"data: [DONE]"):
                    return part.answer()
                if line.startswith(b"data: "):
                    count = len(part.token_ids)
                    part.add(line[6:])
                    if len(part.token_ids) > count:
                        flight.heard = loop.time()
        raise protocol.ProtocolError("the stream ended, expected [DONE] before")

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The reply to a call, which is made again while the network is cut, and once if another
        process of the server got it, which did nothing.

        Raises: ServerFailed for a server that does not prove that it knows the key.
        """
        _, needed = auth.TABLE.get(path.partition("?")[0], ("", "control"))
        key = None if needed == "nobody" else self.keys.control
        try:
            for is_last in (False, True):
                number = None if key is None else await self._proven()
                async with await self._ask(method, path, body, number) as reply:
                    if reply.status == 401 and self._number != number and not is_last:
                        continue
                    yield reply
                    return
        except GONE:
            self._number = None  # another program may take its port
            raise

    async def _proven(self) -> str:
        """The number of the server's process, which has proved that it knows the key.

        Raises: ServerFailed, or what a call raises.
        """
        async with self._proving:
            if self._number is None:
                try:
                    (await self._ask("GET", protocol.HEALTH, limit=self.silence)).close()
                except aiohttp.SocketTimeoutError:
                    raise ServerFailed(
                        f"{self.address}{protocol.HEALTH}: no answer within {self.silence:g} s"
                    ) from None
            assert self._number is not None  # `_ask`
            return self._number

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        number: str | None = None,
        limit: float | None = None,
    ) -> aiohttp.ClientResponse:
        """The reply to a call, from a server that knows the key.

        Args:
            number: of the server's process, which may get a token; None: it gets none
            limit: longest time without a byte [s]
        """
        if self._session is None:
            # servers close connections without a request, or after an error, and do not say so
            secure = True if self.tls is None else self.tls
            connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=secure)
            self._session = aiohttp.ClientSession(
                connector=connector, read_bufsize=protocol.MAX_BODY
            )
        session = self._session
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=limit)
        key = self.keys.control
        host = urlsplit(self.address).netloc.lower()
        challenge = secrets.token_hex(32)
        headers = {} if key is None else {"Host": host, auth.CHALLENGE: challenge}
        if self.bearer is not None and path != protocol.HEALTH:
            headers["Authorization"] = f"Bearer {self.bearer}"
        if key is not None and number is not None:
            headers["Authorization"] = auth.token_of(key, host, number)
        url = self.address + path
        reply = await reached_soon(
            lambda: session.request(
                method, url, headers=headers, json=body, allow_redirects=False, timeout=timeout
            ),
            self.patience,
        )
        if key is not None:
            header = reply.headers.get(auth.PROOF, "")
            self._number = auth.proven_number(key, host, challenge, header)
            if self._number is None:
                with closing(reply):
                    raise ServerFailed(await _unproven(reply))
        return reply

    async def _fetch(self, method: str, path: str, body: Any, timeout: float) -> bytes:
        """The body of an answer. Raises: ServerFailed for another status than 200."""
        where = f"{self.address}{path}"
        try:
            async with asyncio.timeout(timeout), self._reply(method, path, body) as reply:
                text = await reply.read()
        except aiohttp.ClientError as error:  # one of them is a TimeoutError too
            raise _gone(where, error) from error
        except TimeoutError:
            raise ServerFailed(f"{where}: no answer within {timeout:g} s") from None
        except OSError as error:
            raise _gone(where, error) from error
        if reply.status != 200:
            shown = text.decode(errors="replace")[:SHOWN]
            raise ServerFailed(f"{where}: {reply.status} {shown}, expected 200")
        return text

    async def _watched(self) -> None:
        """Fails the server when a request gets no token for too long."""
        loop = asyncio.get_running_loop()
        pause = self.silence / 8
        moved = 0.0
        counters = b""
        last = loop.time()
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            if self.paused or now - last > 2 * pause:  # or this process slept
                for flight in self._flights:
                    flight.heard = now
            last = now
            silent = [f for f in self._flights if now - f.heard > self.silence / 2]
            if not silent or self.failure is not None:
                counters = b""
                continue
            with suppress(ServerFailed):  # a server without counters cannot show that it is busy
                before = counters
                text = await self._fetch("GET", protocol.METRICS, None, self.silence / 4)
                counters = b" ".join(ln for ln in text.splitlines() if ln.startswith(COUNTERS))
                if before and counters != before:
                    moved = now
            limit = self.silence * (BUSY if now - moved < self.silence else 1)
            last = loop.time()
            for flight in silent:
                if last - flight.heard > limit and flight in self._flights and not self.paused:
                    count = len(flight.part.token_ids)
                    reason = f"no token for {limit:g} s, after {count} of a request"
                    self.fail(f"{self.address}{protocol.GENERATE}: {reason}", keeps=True)
                    break


async def _unproven(reply: aiohttp.ClientResponse) -> str:
    """The message that an answer lacks its proof, or has a wrong one."""
    text = ""
    if reply.status != 200:
        with suppress(TimeoutError):  # a part of it may never come
            async with asyncio.timeout(UNPROVEN_S):
                text = f" {(await reply.content.read(SHOWN)).decode(errors='replace')}"
    if auth.PROOF in reply.headers:
        found = "with a wrong proof that it knows the control key"
        advice = "It has other keys than rollout.keys, or another program answers for it"
    else:
        found = "without a proof that it knows the control key"
        advice = (
            "Another program answers there, or the engine was started without rollout.keys or by "
            "an older version of this package. Start the engine again with both"
        )
    return (
        f"{reply.url}: {reply.status}{text} {found}, expected the header {auth.PROOF}; no key was "
        f"sent. {advice}"
    )


def _gone(where: str, error: Exception) -> ServerFailed:
    text = f"{where}: the connection ended{_why(error)}"
    return NotReached(text) if is_cut(error) else ServerFailed(text)


def _why(error: Exception) -> str:
    """The cause of a connection's end, if it is known, after a comma."""
    if isinstance(error, aiohttp.ClientPayloadError):  # it names missing bytes and HTTP's 400
        return ""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        return f", {tls_fault(cause) if isinstance(cause, ssl.SSLError) else cause}"
    return f", {error!r}"
