"""The embedded engine as an HTTP server with vLLM's paths, for hosts without vLLM.

python -m pyrl_ext.rollout.remote.embedded CONFIG [section.key=value ...] --host H --port P
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit
from weakref import WeakSet

import torch
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from pydantic import BaseModel, Field, TypeAdapter

from pyrl_ext.parallel.open_files import SERVER_CONNECTIONS, allow_open_files
from pyrl_ext.plan import Plan
from pyrl_ext.plan.command import parse_plan, plan_parser
from pyrl_ext.rollout.build import build_in_this_process
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.process.server import end_with
from pyrl_ext.rollout.remote import auth, protocol
from pyrl_ext.rollout.remote.commands import PARENT, keys_folder, max_tokens
from pyrl_ext.rollout.remote.embedded_worker import Job, TooBusy, Worker, WrongState
from pyrl_ext.rollout.remote.holder import Holder, Run
from pyrl_ext.rollout.remote.identity import identity_of
from pyrl_ext.rollout.remote.protocol import Answer, ProtocolError, Request
from pyrl_ext.rollout.remote.tls import certificate_of
from pyrl_ext.rollout.remote.weight_receiver import StagedUpdate

LOOK_S = 0.5  # between two looks at a connection before its TLS began
RETRY_S = 5  # after which a client without a place may try again
HANDSHAKE_S = 10.0  # of TLS
HEAD_S = 30.0  # a connection that asks for nothing in this time is closed
MAX_RECENT = 4096  # connections of a peer, after which the oldest is closed if it was silent
BACKLOG = 1024  # connections that wait to be accepted
FLUSH_S = 0.1  # longest time that a token stays here before it is sent
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """The handlers of the paths.

    Args:
        engine: used by this server alone
        max_tokens: longest context and response together
        identity: that a trainer compares before it publishes to this server
    """

    def __init__(self, engine: HFEngine, max_tokens: int, identity: dict[str, str] | None = None):
        self.engine = engine
        self.identity = identity or {}
        self.worker = Worker(engine, max_tokens)
        self.staged = StagedUpdate(engine.shapes(), engine.device)
        self.jobs: set[Job] = set()
        self.holder = Holder()
        self._updates = asyncio.Lock()
        self._guard = auth.Guard(auth.Keys())
        self._asking = WeakSet[asyncio.BaseTransport]()
        self._recent: dict[str, deque[asyncio.BaseTransport]] = {}

    def application(self, guard: auth.Guard) -> web.Application:
        """The server, which asks for keys."""
        self._guard = guard
        app = web.Application(
            client_max_size=protocol.MAX_BODY,
            middlewares=[_noting(self._asking), _authorized(guard), _errors],
        )
        handlers: dict[str, Handler] = {
            protocol.HEALTH: self.health,
            protocol.METRICS: self.metrics,
            protocol.WEIGHT_INFO: self.weight_info,
            protocol.GENERATE: self.generate,
            protocol.PAUSE: self.pause,
            protocol.RESUME: self.resume,
            protocol.START: self.start,
            protocol.UPDATE: self.update,
            protocol.FINISH: self.finish,
            protocol.RESET: self.reset,
            protocol.RPC: self.rpc,
        }
        for path, handler in handlers.items():
            app.router.add_route(auth.TABLE[path][0], path, handler)

        async def prove(http: web.Request, reply: web.StreamResponse) -> None:
            reply.headers.update(guard.proof(http.headers, _port(http)))

        app.on_response_prepare.append(prove)
        return app

    @asynccontextmanager
    async def listens(
        self, listening: socket.socket, guard: auth.Guard, tls: ssl.SSLContext | None = None
    ) -> AsyncGenerator[None]:
        """Serves at a socket. Connections that do not ask for anything are closed, since a process
        has a limit of open files and anybody may connect."""
        runner = web.AppRunner(
            self.application(guard),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1,
            keepalive_timeout=HEAD_S,
        )
        await runner.setup()
        loop = asyncio.get_running_loop()

        def connected() -> asyncio.Protocol:
            assert runner.server is not None  # `setup`
            connection = runner.server()
            # asyncio gives it its transport in the next round, or once TLS has begun
            end = 0.0 if tls is None else loop.time() + HANDSHAKE_S
            loop.call_soon(loop.call_soon, self._opened, connection, end)
            return connection

        limit = None if tls is None else HANDSHAKE_S
        server = await loop.create_server(
            connected, sock=listening, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=limit
        )
        try:
            yield
        finally:
            server.close()
            await runner.cleanup()

    def _opened(self, connection: RequestHandler, end: float) -> None:
        loop = asyncio.get_running_loop()
        transport = connection.transport
        if transport is None:
            if loop.time() < end:
                loop.call_later(LOOK_S, self._opened, connection, end)
            return
        peer: str = transport.get_extra_info("peername")[0]
        recent = self._recent.setdefault(peer, deque())
        recent.append(transport)
        if len(recent) > MAX_RECENT:
            self._close_silent(recent.popleft())
        loop.call_later(HEAD_S, self._in_time, peer, transport)

    def _in_time(self, peer: str, transport: asyncio.BaseTransport) -> None:
        recent = self._recent.get(peer)
        if recent and recent[0] is transport:  # else it was closed before
            recent.popleft()
            if not recent:
                del self._recent[peer]
            self._close_silent(transport)

    def _close_silent(self, transport: asyncio.BaseTransport) -> None:
        if transport not in self._asking:
            cast(asyncio.Transport, transport).abort()

    # requests -------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Answers one request; a client that goes away aborts it."""
        request = Request.from_json(await http.read())
        loop = asyncio.get_running_loop()
        is_trainers = self._guard.role(http.headers, _port(http)) == "control"
        adding = loop.create_task(self.worker.call(self.worker.add, request, loop, is_trainers))
        try:
            job = await asyncio.shield(adding)
        except asyncio.CancelledError:  # the worker may still add it
            adding.add_done_callback(self._abort_added)
            raise
        self.jobs.add(job)
        try:
            return await self._stream(http, job)
        finally:
            self.jobs.discard(job)
            if job.answer is None:
                self.worker.post(self.worker.abort, [job])

    def _abort_added(self, adding: asyncio.Task[Job]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self.worker.post(self.worker.abort, [adding.result()])

    async def _stream(self, http: web.Request, job: Job) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(http)
        sent = 0
        name = job.request.request_id
        while job.answer is None:
            try:
                await asyncio.wait_for(job.done.wait(), FLUSH_S)
            except TimeoutError:
                count = len(job.token_ids)
                if count > sent:
                    tokens = tuple(job.token_ids[:count])
                    top = tuple(job.top[:count])
                    part = Answer(name, tokens, tuple(job.logprobs[:count]), "", top=top)
                    await reply.write(_event(part.message(sent, last=False)))
                    sent = count
        if isinstance(job.answer, Answer):
            await reply.write(_event(job.answer.message(sent)))
        else:
            await reply.write(_event({"error": {"message": str(job.answer), "code": 500}}))
        await reply.write(b"data: [DONE]\n\n")
        return reply

    # pauses and weights ---------------------------------------------------------------------------

    async def pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in protocol.PAUSE_MODES.values():
            raise ProtocolError(f"pause: mode {mode!r}, expected wait, keep or abort")
        loop = asyncio.get_running_loop()
        paused = asyncio.Event()
        await self.worker.call(
            self.worker.pause, mode, lambda: loop.call_soon_threadsafe(paused.set)
        )
        await paused.wait()
        return web.json_response({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        async with self._updates:
            await self.worker.call(self.worker.resume)
        return web.json_response({"status": "resumed"})

    async def start(self, http: web.Request) -> web.Response:
        async with self._updates:
            await self.worker.call(self.worker.require_paused, "start_weight_update")
            self.staged.start()
        return web.json_response({"message": "Weight update started"})

    async def update(self, http: web.Request) -> web.Response:
        """Receives all weights while the engine keeps its own."""
        body = await _body(http, _Update)
        async with self._updates:
            await asyncio.to_thread(self.staged.update, body.update_info)
        return web.json_response({"message": "Weights updated"})

    async def finish(self, http: web.Request) -> web.Response:
        """Loads what came."""
        body = await _body(http, _Finish)
        async with self._updates:
            info, tensors = self.staged.finish(int(body.weight_version))
            await self.worker.call(self.worker.load, tensors, info.version, info.only)
        return web.json_response({"message": "Weight update finished"})

    async def weight_info(self, http: web.Request) -> web.Response:
        version = self.engine.version
        return web.json_response({"weight_version": None if version is None else str(version)})

    async def reset(self, http: web.Request) -> web.Response:
        """Nothing to do: finished requests leave no caches."""
        return web.json_response({"success": True})

    async def rpc(self, http: web.Request) -> web.Response:
        """A method of the engine's only worker, as a list of one result."""
        body = protocol.parse(_CALL, http.path, await http.read())
        if isinstance(body, _Held):
            call = self.holder.claim if body.method == "claim" else self.holder.release
            answer = call(Run(*body.args))
            if self.holder.run is None:
                self.staged.forget_kept()
            return web.json_response({"results": [answer]})
        if body.method == "identity":
            return web.json_response({"results": [self.identity]})
        if body.method == "kept":
            return web.json_response({"results": [self.staged.kept]})
        digests = await self.worker.call(self.engine.checksums, body.args[0])
        return web.json_response({"results": [digests]})

    async def health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.worker.is_alive() else 503)

    async def metrics(self, http: web.Request) -> web.Response:
        """In Prometheus' form, under vLLM's names."""
        running = self.worker.running
        counts = self.worker.counts
        lines = [
            f"vllm:num_requests_running {running}",
            f"vllm:num_requests_waiting {len(self.jobs) - running}",
            f"vllm:prompt_tokens_total {counts['prompt']}",
            f"vllm:generation_tokens_total {counts['generation']}",
            f"vllm:request_success_total {counts['answers']}",
        ]
        return web.Response(text="\n".join(lines) + "\n")


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


Name = Annotated[str, Field(max_length=1000)]


class _Update(BaseModel):
    update_info: dict[str, Any]


class _Finish(BaseModel):
    weight_version: Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]


class _Held(BaseModel):
    method: Literal["claim", "release"]
    args: tuple[Name, Name]


class _RpcCall(BaseModel):
    method: Literal["identity", "kept", "weight_digests"]
    args: tuple[list[str] | None] = (None,)


_CALL: TypeAdapter[_Held | _RpcCall] = TypeAdapter(
    Annotated[_Held | _RpcCall, Field(discriminator="method")]
)


async def _body[T: BaseModel](http: web.Request, kind: type[T]) -> T:
    """The message in a body. Raises: ProtocolError."""
    return protocol.parse(TypeAdapter(kind), http.path, await http.read())


def _noting(asking: WeakSet[asyncio.BaseTransport]) -> Any:
    """Adds the connection of each request."""

    @web.middleware
    async def noted(http: web.Request, handler: Handler) -> web.StreamResponse:
        if http.transport is not None:
            asking.add(http.transport)
        return await handler(http)

    return noted


def _port(http: web.Request) -> int:
    """The port of a request's connection, at this end; 0: the client left."""
    name = None if http.transport is None else http.transport.get_extra_info("sockname")
    return name[1] if name else 0


def _authorized(guard: auth.Guard) -> Any:
    @web.middleware
    async def authorized(http: web.Request, handler: Handler) -> web.StreamResponse:
        path = http.raw_path.partition("?")[0]
        refused = guard.refusal(http.method, path, http.headers, _port(http))
        if refused is None:
            return await handler(http)
        return web.Response(status=refused[0], body=auth.refusal_body(*refused))

    return authorized


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """400 for a wrong request, 409 at a wrong time, 503 without a free place, 500 for a failure;
    each with the reason."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status = error.status
        reason = error.text or error.reason
    except ValueError as error:
        status = 400
        reason = str(error)
    except RuntimeError as error:
        known: dict[type[Exception], int] = {WrongState: 409, TooBusy: 503}
        status = known.get(type(error), 500)
        reason = str(error)
    later = {"Retry-After": str(RETRY_S)} if status == 503 else None
    return web.Response(status=status, body=auth.refusal_body(status, reason), headers=later)


async def serve(
    server: EmbeddedServer,
    listening: socket.socket,
    guard: auth.Guard,
    tls: ssl.SSLContext | None,
) -> None:
    """Serve until SIGTERM or SIGINT; prints the address once it does."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    async with server.listens(listening, guard, tls):
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        server.worker.start()
        host, port = listening.getsockname()[:2]
        print(f"{'http' if tls is None else 'https'}://{host}:{port}", flush=True)
        await ended.wait()
        server.worker.stop()


def address_of(plan: Plan, host: str, port: int) -> str | None:
    """The address by which the trainer of a plan calls the engine at a host, whose name may have
    capitals there; None: it calls none there."""
    for address in plan.addresses:
        place = urlsplit(address)
        if (place.hostname, place.port) == (host.lower(), port):
            return address
    return None


def main() -> int:
    parser = plan_parser("pyrl_ext.rollout.remote.embedded", __doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: the kernel chooses one")
    options, plan = parse_plan(parser, None)
    if plan is None:
        return 2
    if PARENT in os.environ:
        end_with(int(os.environ[PARENT]))
    keys = auth.server_keys(keys_folder(plan), options.host)
    certificate = certificate_of(plan)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    allow_open_files(SERVER_CONNECTIONS)
    listening = socket.create_server((options.host, options.port), backlog=BACKLOG)
    engine = build_in_this_process(plan, torch.device(plan.device))
    assert isinstance(engine, HFEngine)  # a rule says so
    server = EmbeddedServer(engine, max_tokens(plan), identity_of(plan))
    tls = None if certificate is None else certificate.context
    guard = auth.Guard(keys, address_of(plan, options.host, options.port))
    asyncio.run(serve(server, listening, guard, tls))
    sys.stdout.flush()
    os._exit(0)  # its thread may be within a forward


if __name__ == "__main__":
    sys.exit(main())
