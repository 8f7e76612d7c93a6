"""A small server that speaks the engines' protocol over real HTTP, rightly or wrongly.

Its tokens are a function of the random stream and of their place, so that an answer can be compared
with one that nothing disturbed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from aiohttp import web

from pyrl_ext.rollout.remote.auth import Guard, Keys
from pyrl_ext.rollout.remote.protocol import Answer, Request

LAYERS = 4
EXPERTS = 8
K = 2
VOCAB = 100
Messages = list[dict[str, Any]]
Twist = Callable[[Request, Messages], list[Any]]


def token_at(stream: Sequence[int], place: int) -> int:
    """The token of a random stream at this place of the sequence."""
    return 3 + hash((*stream, place)) % (VOCAB - 3)


def logprob_of(token: int) -> float:
    return -token / 128


def rows_of(tokens: Sequence[int], begin: int, end: int) -> np.ndarray:
    """Routes of the tokens [begin, end), a function of each token and its place."""
    wanted = np.arange(begin, end)[:, None, None]
    ids = np.array(tokens[begin:end], dtype=np.int64)[:, None, None]
    layer = np.arange(LAYERS)[:, None]
    slot = np.arange(K)
    return ((ids + wanted + 3 * layer + slot) % EXPERTS).astype(np.uint8)


class HttpEngine:
    """A server in a thread; set its attributes while it runs.

    Attributes:
        version: of its weights
        seconds: that a token takes
        stops: tokens of a response after which it ends with "stop"; None: at its budget
        silent: a request gets no answer, not even its head
        hangs_after: no token comes after so many of a response; None: it does not hang
        busy: it counts tokens of others while it hangs
        dies: the connections break after so many further tokens, and the server ends
        status: of all answers to requests, with an error; None: 200
        twist: changes the messages of an answer; bytes are sent as they are, None: no [DONE]
        asked: requests, in the order in which they came
        running, most_running: number of requests without an answer
        controls: paths of the control calls, counted
    """

    def __init__(self, keys: Keys | None = None):
        self.version = 1
        self.seconds = 0.0
        self.guard = Guard(keys or Keys())
        self.stops: int | None = None
        self.silent = False
        self.hangs_after: int | None = None
        self.busy = False
        self.running = self.most_running = 0
        self.status: int | None = None
        self.dies: int | None = None
        self.twist: Twist | None = None
        self.asked: list[Request] = []
        self.controls: Counter[str] = Counter()
        self.generated = 0
        self._transports: set[Any] = set()
        self._loop = asyncio.new_event_loop()
        self._aborts = asyncio.Event()
        self._ends = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End the server; connections break."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it ended meanwhile
                self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join()

    def __enter__(self) -> HttpEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        await self._start()
        started.set()
        await self._ends.wait()
        self._server.close()
        for transport in self._transports:
            transport.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._kept])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._control)
        app.on_response_prepare.append(self._prove)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        assert self._runner.server is not None
        self._server = await self._loop.create_server(self._runner.server, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    @web.middleware
    async def _kept(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self._transports.add(request.transport)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        self.generated += self.busy
        return web.Response(text=f'vllm:generation_tokens_total{{a="0"}} {self.generated}\n')

    async def _control(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.controls[request.path] += 1
        if request.path == "/pause":
            if request.query.get("mode") == "abort":
                self._aborts.set()
                self._aborts = asyncio.Event()
            self._goes_on.clear()
        elif request.path == "/resume":
            self._goes_on.set()
        elif request.path == "/finish_weight_update":
            self.version = int((await request.json())["weight_version"])
        elif request.path == "/no":
            return web.json_response({"success": False})
        elif request.path == "/slow":
            await asyncio.sleep(1000)
        return web.json_response({"success": True})

    def _knows(self, request: web.Request) -> bool:
        return self.guard.role(request.headers, self.port) == "control"

    async def _prove(self, request: web.Request, reply: web.StreamResponse) -> None:
        reply.headers.update(self.guard.proof(request.headers, self.port))

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if not self._knows(http):
            return web.json_response({"error": "Unauthorized"}, status=401)
        asked = Request.from_json(await http.read())
        if self.status is not None:
            return web.json_response({"error": "because"}, status=self.status)
        self.asked.append(asked)
        if self.silent:
            await asyncio.sleep(1000)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(http)
        aborts = self._aborts
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._goes_on.wait()
            for message in await self._messages(asked, aborts, reply):
                if message is None:
                    return reply
                await self._send(reply, message)
        finally:
            self.running -= 1
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _send(self, reply: web.StreamResponse, message: Any) -> None:
        if not isinstance(message, bytes):
            message = b"data: " + json.dumps(message).encode() + b"\n\n"
        await reply.write(message)

    async def _messages(
        self, asked: Request, aborts: asyncio.Event, reply: web.StreamResponse
    ) -> list[Any]:
        """Sends the tokens but the last, or none if something twists them; returns the rest."""
        tokens = list(asked.token_ids)
        spans = list[list[int]]()
        first = len(asked.token_ids)
        waiting: Messages = []
        finish = "length"
        for place in range(first, first + asked.max_tokens):
            while self.hangs_after is not None and place - first >= self.hangs_after:
                await asyncio.sleep(0.01)
            if self.seconds or self.twist is None:
                await asyncio.sleep(self.seconds)
            if self.dies is not None:
                self.dies -= 1
                if self.dies < 0:
                    self._ends.set()
                    await asyncio.sleep(1000)
            if aborts.is_set():
                finish = "abort"
                break
            tokens.append(token_at(asked.random_stream, place))
            self.generated += 1
            count = place - first + 1
            if not spans or spans[-1][2] != self.version:
                spans.append([count - 1, count, self.version])
            spans[-1][1] = count
            whole = self._answer(asked, tokens, spans, "length")
            if self.stops == count:
                finish = "stop"
                break
            if count < asked.max_tokens:
                waiting.append(whole.message(count - 1, last=False))
                if self.twist is None:
                    await self._send(reply, waiting.pop())
        whole = self._answer(asked, tokens, spans, finish)
        sent = len(tokens) - first
        begin = sent if finish == "abort" else sent - 1
        waiting.append(whole.message(begin))
        return waiting if self.twist is None else self.twist(asked, waiting)

    def _answer(
        self, asked: Request, tokens: Sequence[int], spans: list[list[int]], finish: str
    ) -> Answer:
        new = tokens[len(asked.token_ids) :]
        return Answer(
            asked.request_id,
            tuple(new),
            tuple(map(logprob_of, new)),
            finish,
            tuple((b, e, v) for b, e, v in spans),
            rows_of(tokens, asked.routes_from, len(tokens) - 1) if new else None,
            0,
        )


def request_of(prompt: int, index: int = 0, budget: int = 12, **fields: Any) -> Request:
    """A request of one sample; its random stream is (7, prompt, index)."""
    context = (5, 6, 7 + prompt % 50)
    name = f"{prompt}-{index}"
    stream = (7, prompt, index)
    return Request(name, context, budget, random_stream=stream, **fields)


def tokens_of(request: Request) -> list[int]:
    """The whole response that every server gives to a request."""
    begin = len(request.token_ids)
    return [token_at(request.random_stream, begin + place) for place in range(request.max_tokens)]
