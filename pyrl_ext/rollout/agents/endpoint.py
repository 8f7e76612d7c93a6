"""The OpenAI-compatible server of agents, in a thread with its event loop."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from aiohttp import web

from pyrl_ext.rollout.agents import protocol
from pyrl_ext.rollout.agents.protocol import (
    Answer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Rules,
)

MOST_BYTES = 16 << 20  # of a body
_WAITING_SECONDS = 10.0  # between signs of life of a stream
_CLOSE_SECONDS = 10.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Callee(Protocol):
    """A trajectory. All methods run in the endpoint's event loop."""

    async def chat(self, request: ChatRequest) -> Answer:
        """Answer messages; cancelled if the client goes away. Raises: ApiError."""
        ...

    async def complete(self, request: CompletionRequest) -> Answer:
        """Continue a text or token ids; as `chat`."""
        ...

    def undelivered(self, answer: Answer) -> None:
        """Called if the client went away before an answer was written."""
        ...


class Endpoint:
    """Serves trajectories, each under a key, on a local address.

    A caller shows its key as ``Authorization: Bearer KEY``, or calls below ``/t/KEY/v1``.

    Args:
        rules: what the run's sampling allows
        host, port: to listen on; port 0: a free one

    Attributes:
        loop: the event loop, once started
        url: its address, with /v1
    """

    def __init__(self, rules: Rules, host: str = "127.0.0.1", port: int = 0):
        self.rules = rules
        self.host = host
        self.port = port
        self.url = ""
        self.loop = asyncio.new_event_loop()
        self._callees: dict[str, Callee] = {}
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._closing = False

    def start(self) -> None:
        """Listen. Raises: OSError if the address cannot be used."""
        self._thread = threading.Thread(target=self._run, name="agents' endpoint", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result()

    def add(self, callee: Callee) -> str:
        """A new key of a trajectory; from any thread."""
        key = secrets.token_hex(16)
        self._callees[key] = callee
        return key

    def remove(self, key: str) -> None:
        """Serve a trajectory no longer; from any thread."""
        self._callees.pop(key, None)

    def close(self) -> None:
        """End the server and its thread; open calls get an error."""
        if self._thread is None:
            self.loop.close()
            return
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._shaped])
        for prefix in ("/v1", "/t/{key}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._complete)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{model}}", self._model)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_SECONDS
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://{self.host}:{self.port}/v1"

    async def _end(self) -> None:
        self._closing = True
        for call in self._calls:
            call.cancel()
        assert self._runner is not None  # `start` has set it
        await self._runner.cleanup()

    @web.middleware
    async def _shaped(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error as OpenAI's JSON."""
        try:
            return await handler(request)
        except ApiError as error:
            return _error(error)
        except web.HTTPRequestEntityTooLarge:
            text = f"a body of more than {MOST_BYTES} bytes, expected at most that many"
            return _error(ApiError(413, text))
        except web.HTTPException as error:
            methods = error.headers.get("Allow", "")
            rule = f"expected {methods}" if methods else "expected /v1/chat/completions"
            text = f"{request.method} {request.path[:200]}: {error.reason}, {rule}"
            return _error(ApiError(error.status, text, kind="not_found_error"))
        except ConnectionError:
            raise
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            text = f"{type(error).__name__} in the trainer, expected an answer; its stderr has more"
            return _error(ApiError(500, text, kind="server_error"))

    def _callee(self, request: web.Request) -> Callee:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = request.match_info.get("key") or (key if scheme.lower() == "bearer" else "")
        # keys have 128 random bits, so that the time of a lookup tells nothing about them
        callee = self._callees.get(key.strip())
        if callee is None:
            rule = "expected the API key of a trajectory that runs"
            text = "Incorrect API key provided" if key else "No API key provided"
            raise ApiError(401, f"{text}, {rule}", "invalid_api_key", kind="authentication_error")
        return callee

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        callee = self._callee(request)
        asked = protocol.read_chat(await request.read(), self.rules)
        model = self.rules.model
        if asked.stream:
            return await self._streamed(
                request,
                callee,
                callee.chat(asked),
                lambda answer: protocol.chat_chunks(answer, model, asked),
            )
        answer = await self._called(callee.chat(asked))
        body = protocol.chat_body(answer, model, asked.logprobs)
        return await _written(request, callee, answer, body)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        callee = self._callee(request)
        asked = protocol.read_completion(await request.read(), self.rules)
        model = self.rules.model

        def body(answer: Answer) -> dict[str, Any]:
            return protocol.completion_body(answer, model, asked.logprobs)

        if asked.stream:
            chunks = lambda answer: [body(answer)]  # noqa: E731
            return await self._streamed(request, callee, callee.complete(asked), chunks)
        answer = await self._called(callee.complete(asked))
        return await _written(request, callee, answer, body(answer))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._callee(request)
        return web.json_response(protocol.models_body(self.rules.model))

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._callee(request)
        name = request.match_info["model"]
        if name != self.rules.model:
            text = f"the model {name[:200]!r} does not exist, expected {self.rules.model!r}"
            raise ApiError(404, text, "model_not_found", "model")
        return web.json_response(protocol.model_body(name))

    async def _called(self, call: Awaitable[Answer]) -> Answer:
        """The answer of a trajectory. Raises: ApiError; CancelledError if the client went away."""
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closing:
                raise ApiError(503, "the run is over", kind="server_error") from None
            raise
        finally:
            self._calls.discard(task)

    async def _streamed(
        self,
        request: web.Request,
        callee: Callee,
        call: Awaitable[Answer],
        chunks: Callable[[Answer], Iterable[dict[str, Any]]],
    ) -> web.StreamResponse:
        """An answer as events, once it is there as a whole; comments show that it is awaited.

        An error that comes after a first comment is an event: the status is sent already.
        """
        task = asyncio.ensure_future(self._called(call))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            while not (await asyncio.wait([task], timeout=_WAITING_SECONDS))[0]:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": waiting\n\n")
        except BaseException:
            task.cancel()
            raise
        try:
            answer = task.result()
        except ApiError as error:
            if not response.prepared:
                raise
            await response.write(_event(error.body()))
            return response
        try:
            if not response.prepared:
                await response.prepare(request)
            for chunk in chunks(answer):
                await response.write(_event(chunk))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            callee.undelivered(answer)
            raise
        return response


async def _written(
    request: web.Request, callee: Callee, answer: Answer, body: dict[str, Any]
) -> web.StreamResponse:
    """Write an answer here, to know whether the client was there."""
    response = web.json_response(body)
    try:
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the client went away")
        await response.prepare(request)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        callee.undelivered(answer)
        raise
    return response


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _error(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)
