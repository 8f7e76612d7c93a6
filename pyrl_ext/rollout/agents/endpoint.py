"""The OpenAI-compatible endpoint that agents call, in a thread of the trainer.

Each trajectory has a secret key; what a program calls with it goes to that trajectory. Programs
that take only a URL have the key in it: http://HOST:PORT/t/KEY/v1.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import select
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from pyrl_ext.rollout.agents import protocol
from pyrl_ext.rollout.agents.protocol import (
    Answer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Head,
    Rules,
)

WAITING_S = 10.0  # between the comments of a stream that waits for its answer
SHUTDOWN_S = 2.0  # longest wait at the end for clients that do not read
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Writer = Callable[[Answer], dict[str, Any] | list[dict[str, Any]]]  # a list: events of a stream


class Callee(Protocol):
    """A trajectory. All methods run in the endpoint's event loop."""

    async def chat(self, request: ChatRequest) -> Answer:
        """The answer to a chat. Raises: ApiError."""
        ...

    async def complete(self, request: CompletionRequest) -> Answer:
        """The answer to a prompt. Raises: ApiError."""
        ...

    def undelivered(self, answer: Answer) -> None:
        """The client went away before the answer was written."""
        ...


class Endpoint:
    """The server, which listens once it is built and answers once it is started.

    Args:
        rules: of the run
        host: address to listen on
        port: 0: a free one

    Attributes:
        loop: of the server's thread
        url: that clients take as their base URL

    Raises: OSError for an address that cannot be used.
    """

    def __init__(self, rules: Rules, host: str = "127.0.0.1", port: int = 0):
        self.rules = rules
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=1024)
        number = self._listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{number}/v1"
        self.loop = asyncio.new_event_loop()
        self._created = int(time.time())
        # By digests of keys, so that the time of a look-up tells nothing about a key.
        self._callees: dict[bytes, Callee] = {}
        self._running: set[asyncio.Task[Answer]] = set()
        self._closing = False
        self._ended = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread: threading.Thread | None = None

    # threads of the trainer -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; returns once the server answers."""
        self._thread = threading.Thread(target=self._run, name="agents endpoint", daemon=True)
        self._thread.start()
        self._started.result()

    def add(self, callee: Callee) -> str:
        """The new secret key of a trajectory. Any thread may call this."""
        key = secrets.token_urlsafe(32)
        self._callees[_digest(key)] = callee
        return key

    def remove(self, key: str) -> None:
        """Refuse later calls with a key; running ones go on. Any thread may call this.

        Raises: KeyError for a key that is not in use.
        """
        del self._callees[_digest(key)]

    def close(self) -> None:
        """End the server and its thread; open calls get a 503. Not for the loop's own thread."""
        if self._thread is None:
            self._listening.close()
            self.loop.close()
            return
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    # the endpoint's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
        )
        try:
            await runner.setup()
            await web.SockSite(runner, self._listening).start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        await self._ended.wait()
        self._closing = True
        for task in self._running:
            task.cancel()
        await runner.cleanup()

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=protocol.MAX_BODY, middlewares=[_errors])
        app.on_response_prepare.append(_name_reply)
        for prefix in ("/v1", "/t/{key}/v1"):
            app.router.add_route("POST", f"{prefix}/chat/completions", self._chat)
            app.router.add_route("POST", f"{prefix}/completions", self._complete)
            app.router.add_route("GET", f"{prefix}/models", self._models)
            app.router.add_route("GET", f"{prefix}/models/{{model:.+}}", self._model)
        return app

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        callee, request = await self._read(http, protocol.read_chat)
        write = protocol.chat_chunks if request.stream else protocol.chat_reply
        reply = partial(write, request=request, head=self._head("chatcmpl"))
        return await self._answer(http, callee, callee.chat(request), request.stream, reply)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        callee, request = await self._read(http, protocol.read_completion)
        write = protocol.completion_chunks if request.stream else protocol.completion_reply
        reply = partial(write, request=request, head=self._head("cmpl"))
        return await self._answer(http, callee, callee.complete(request), request.stream, reply)

    async def _read[T](
        self, http: web.Request, read: Callable[[bytes, Rules], T]
    ) -> tuple[Callee, T]:
        """The trajectory of a call, and its request. Raises: ApiError."""
        self._callee(http)  # nothing is read without a key
        request = read(await _body(http), self.rules)
        return self._callee(http), request  # the key may be removed meanwhile

    async def _models(self, http: web.Request) -> web.StreamResponse:
        self._callee(http)
        entry = protocol.model_entry(self.rules.model, self._created)
        return web.json_response({"object": "list", "data": [entry]})

    async def _model(self, http: web.Request) -> web.StreamResponse:
        self._callee(http)
        protocol.require_model(http.match_info["model"], self.rules)
        return web.json_response(protocol.model_entry(self.rules.model, self._created))

    def _head(self, kind: str) -> Head:
        return Head(f"{kind}-{uuid.uuid4().hex}", int(time.time()), self.rules.model)

    def _callee(self, http: web.Request) -> Callee:
        """The trajectory of a request's key. Raises: ApiError."""
        authorization = http.headers.get("Authorization", "")
        scheme, _, given = authorization.partition(" ")
        bearer = given if scheme.lower() == "bearer" else ""
        key = http.match_info.get("key", http.headers.get("X-API-Key", bearer))
        callee = self._callees.get(_digest(key))
        if callee is None:
            raise ApiError(
                401,
                "no key of a running trajectory, expected one in the header Authorization: Bearer "
                "KEY or X-API-Key: KEY, or in the base URL, /t/KEY/v1",
                "invalid_api_key",
                kind="authentication_error",
            )
        return callee

    async def _answer(
        self,
        http: web.Request,
        callee: Callee,
        call: Coroutine[Any, Any, Answer],
        stream: bool,
        write: Writer,
    ) -> web.StreamResponse:
        """Run a call and write its reply. A client that goes away cancels the call.

        A stream is sent when the whole answer is there: the policy samples it in one piece, and
        tool calls are found in the whole text. Until then the client gets a comment now and then,
        so that neither it nor a proxy takes the silence for an end.

        Raises: ApiError while nothing is written; later ones are events of the stream.
        """
        task = self.loop.create_task(call)
        response = web.StreamResponse()
        response.content_type = "text/event-stream" if stream else "application/json"
        if self._closing:
            task.cancel()
        self._running.add(task)
        try:
            await _wait(http, task, response, WAITING_S if stream else None)
            answer = self._result(task)
            content = _written(callee, answer, write)
        except ApiError as error:
            if not response.prepared:
                raise
            await response.write(_event(error.body()))
            await response.write_eof()
            return response
        except (ConnectionError, asyncio.CancelledError):
            task.cancel()
            task.add_done_callback(lambda task: _abandon(callee, task))
            raise
        finally:
            self._running.discard(task)
        try:
            if _hung_up(http.transport):
                raise ConnectionResetError("the client went away")
            if not stream:
                response.content_length = len(content)
            await response.prepare(http)
            await response.write(content)
        except BaseException:
            _give_back(callee, answer)
            raise
        with contextlib.suppress(ConnectionError):  # the client may leave once it has the answer
            await response.write_eof()
        return response

    def _result(self, task: asyncio.Task[Answer]) -> Answer:
        """The answer of a call that ended. Raises: ApiError."""
        try:
            return task.result()
        except ApiError:
            raise
        except asyncio.CancelledError as error:
            if self._closing:
                message = "the endpoint closes, expected no calls at the end of the rollouts"
                raise ApiError(503, message, kind="server_error") from None
            raise _failure(error) from None
        except Exception as error:
            raise _failure(error) from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


async def _body(http: web.Request) -> bytes:
    """The body of a request. Raises: ApiError."""
    if http.content_length is not None and http.content_length > protocol.MAX_BODY:
        raise web.HTTPRequestEntityTooLarge(protocol.MAX_BODY, http.content_length)
    try:
        return await http.read()
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None


async def _wait(
    http: web.Request,
    task: asyncio.Task[Answer],
    response: web.StreamResponse,
    pause: float | None,
) -> None:
    """Wait until a call ended.

    Args:
        pause: between comments [s]; None: there are none
    """
    while True:
        await asyncio.wait({task}, timeout=pause)
        if task.done():
            return
        if not response.prepared:
            await response.prepare(http)
        await response.write(b": waiting\n\n")


def _hung_up(transport: asyncio.Transport | None) -> bool:
    """True if the client closed its connection, which the event loop may not know yet."""
    if transport is None or transport.is_closing():
        return True
    events = select.poll()
    events.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(events.poll(0))


def _abandon(callee: Callee, task: asyncio.Task[Answer]) -> None:
    """Look at the end of a call whose client went away."""
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        _give_back(callee, task.result())
    elif not isinstance(error, ApiError):
        traceback.print_exception(error, file=sys.stderr)


def _give_back(callee: Callee, answer: Answer) -> None:
    try:
        callee.undelivered(answer)
    except Exception as error:
        traceback.print_exception(error, file=sys.stderr)


def _written(callee: Callee, answer: Answer, write: Writer) -> bytes:
    """The body of a reply. Raises: ApiError for what JSON cannot hold, NaN for example."""
    try:
        written = write(answer)
        return _events(written) if isinstance(written, list) else _json(written)
    except Exception as error:
        _give_back(callee, answer)
        raise _failure(error) from None


def _failure(error: BaseException) -> ApiError:
    """The error that a client gets for an unexpected exception, whose traceback is printed."""
    traceback.print_exception(error, file=sys.stderr)
    name = type(error).__name__
    message = f"the trainer failed with {name}, expected an answer; its output has the traceback"
    return ApiError(500, message, kind="server_error")


def _json(message: dict[str, Any]) -> bytes:
    return json.dumps(message, allow_nan=False).encode()


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + _json(message) + b"\n\n"


def _events(messages: list[dict[str, Any]]) -> bytes:
    events = [_event(message) for message in messages]
    return b"".join(events) + b"data: [DONE]\n\n"


async def _name_reply(http: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = f"req_{uuid.uuid4().hex}"


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's JSON."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as error:
        told = error
    except web.HTTPRequestEntityTooLarge:
        text = f"the body is too large, expected at most {protocol.MAX_BODY >> 20} MiB"
        told = ApiError(413, text)
    except web.HTTPMethodNotAllowed as error:
        headers["Allow"] = error.headers["Allow"]
        text = f"{request.method}, expected {headers['Allow']}"
        told = ApiError(405, text, "method_not_allowed")
    except web.HTTPException as error:
        text = (
            f"{request.method} {request.path[: protocol.SHOWN]} is not served, expected POST "
            "/v1/chat/completions, POST /v1/completions, GET /v1/models or GET /v1/models/MODEL"
        )
        told = ApiError(error.status, text, "unknown_url", kind="not_found_error")
    except ConnectionError:
        raise
    except Exception as error:
        told = _failure(error)
    if told.status >= 500:
        headers["x-should-retry"] = "false"  # the official clients would call again
    return web.json_response(told.body(), status=told.status, headers=headers)
