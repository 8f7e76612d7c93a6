"""A server of a teacher as vLLM writes its answers, with the log-probs of transformers' model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web

from tests.helpers import teachers

Twist = Callable[[dict[str, Any]], object]


class TeacherServer:
    """A server in a thread; set its attributes while it runs.

    Attributes:
        models: what it lists, [{"id": name, "max_model_len": tokens}]
        key: that it requires; None: none
        status: of all answers, with an error; None: 200
        answers: completions that it gives, before its status is 500; None: all
        hangs: it never answers a completion
        twist: changes an answer
        asked: bodies of the completions, in the order in which they came
    """

    def __init__(self, model: Any, name: str = "taught", longest: int = 512):
        self.model = model
        self.models: list[dict[str, Any]] = [{"id": name, "max_model_len": longest}]
        self.key: str | None = None
        self.status: int | None = None
        self.answers: int | None = None
        self.hangs = False
        self.twist: Twist | None = None
        self.asked: list[dict[str, Any]] = []
        self._scored: dict[tuple[int, ...], list[float]] = {}
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> TeacherServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server; nobody listens at its address any more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join()

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._ends = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        assert runner.server is not None
        server = await self._loop.create_server(runner.server, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._ends.wait()
        server.close()
        await runner.cleanup()

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.status is not None:
            return web.json_response({"error": {"message": "broken"}}, status=self.status)
        return None

    async def _list(self, request: web.Request) -> web.Response:
        listed = {"object": "list", "data": self.models}
        return self._refusal(request) or web.json_response(listed)

    def _logprobs(self, tokens: tuple[int, ...]) -> list[float]:
        if tokens not in self._scored:
            found = teachers.logprobs(self.model, torch.tensor(tokens))
            self._scored[tokens] = found.tolist()
        return self._scored[tokens]

    async def _complete(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        self.asked.append(body)
        if self.answers is not None and len(self.asked) >= self.answers:
            self.status = 500
        if self.hangs:
            await asyncio.Event().wait()
        tokens = body["prompt"]
        entries: list[dict[str, Any] | None] = [None]
        for token, logprob in zip(tokens[1:], self._logprobs(tuple(tokens)), strict=True):
            entries.append({str(token): {"logprob": logprob, "rank": 1, "decoded_token": "x"}})
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
        answer = {"object": "text_completion", "choices": [{**choice, "prompt_logprobs": entries}]}
        if self.twist is not None:
            self.twist(answer)
        return web.json_response(answer, dumps=json.dumps)  # writes NaN, which is no JSON
