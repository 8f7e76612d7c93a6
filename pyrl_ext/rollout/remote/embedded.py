"""The embedded engine as an HTTP server with vLLM's paths: what runs where there is no vLLM.

python -m pyrl_ext.rollout.remote.embedded CONFIG [section.key=value ...] --host H --port P
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from aiohttp import web

from pyrl_ext.plan.command import parse_plan, plan_parser
from pyrl_ext.rollout.build import build_in_this_process
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.process.server import end_with
from pyrl_ext.rollout.remote import guard, protocol
from pyrl_ext.rollout.remote.commands import PARENT, keys_folder, max_tokens
from pyrl_ext.rollout.remote.identity import identity_of
from pyrl_ext.rollout.remote.lanes import Job
from pyrl_ext.rollout.remote.protocol import Answer, ProtocolError, Request
from pyrl_ext.rollout.remote.weight_protocol import TransferError
from pyrl_ext.rollout.remote.weight_receiver import StagedUpdate
from pyrl_ext.rollout.remote.worker import Refused, Worker

FLUSH = 0.1  # longest time that a token stays here before it is sent [s]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The handlers of the paths.

    Args:
        engine: used by this server alone
        max_tokens: longest context and response together
        identity: what a trainer compares before it publishes to this server
    """

    def __init__(self, engine: HFEngine, max_tokens: int, identity: dict[str, str] | None = None):
        self.engine = engine
        self.identity = identity or {}
        self.worker = Worker(engine, max_tokens)
        self.staged = StagedUpdate(engine.shapes(), engine.device)
        self.jobs: set[Job] = set()
        self._updates = asyncio.Lock()

    def application(self, keys: guard.Keys | None) -> web.Application:
        """The server, behind the guard."""
        app = web.Application(
            client_max_size=protocol.MAX_BODY, middlewares=[guard.for_aiohttp(keys), _errors]
        )
        get = {
            protocol.HEALTH: self.health,
            protocol.METRICS: self.metrics,
            protocol.IS_PAUSED: self.is_paused,
            protocol.WEIGHT_INFO: self.weight_info,
        }
        post = {
            protocol.GENERATE: self.generate,
            protocol.ABORT: self.abort,
            protocol.PAUSE: self.pause,
            protocol.RESUME: self.resume,
            protocol.INIT_TRANSFER: self.init_transfer,
            protocol.SHUTDOWN_TRANSFER: self.shutdown_transfer,
            protocol.START: self.start,
            protocol.UPDATE: self.update,
            protocol.FINISH: self.finish,
            protocol.RESET: self.reset,
            protocol.RPC: self.rpc,
        }
        app.add_routes([web.get(path, handler) for path, handler in get.items()])
        app.add_routes([web.post(path, handler) for path, handler in post.items()])
        return app

    # requests -------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Answers one request; a client that goes away aborts it."""
        request = Request.from_json(await _body(http))
        loop = asyncio.get_running_loop()
        adding = loop.create_task(self.worker.call(self.worker.add, request, loop))
        try:
            job = await asyncio.shield(adding)
        except asyncio.CancelledError:  # it may be added yet
            adding.add_done_callback(self._gone)
            raise
        self.jobs.add(job)
        try:
            if request.stream:
                return await self._stream(http, job)
            await job.done.wait()
            return web.json_response(_whole(job).to_json())
        finally:
            self.jobs.discard(job)
            if job.answer is None:
                self.worker.post(self.worker.abort, [job])

    def _gone(self, adding: asyncio.Task[Job]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self.worker.post(self.worker.abort, [adding.result()])

    async def _stream(self, http: web.Request, job: Job) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(http)
        sent = 0
        name = job.request.request_id
        while job.answer is None:
            try:
                await asyncio.wait_for(job.done.wait(), FLUSH)
            except TimeoutError:
                until = len(job.token_ids)
                if until > sent:
                    tokens = tuple(job.token_ids[:until])
                    tops = tuple(job.top[:until])
                    part = Answer(name, tokens, tuple(job.logprobs[:until]), "", top=tops)
                    await reply.write(_event(part.message(sent, last=False)))
                    sent = until
        try:
            answer = _whole(job)
        except web.HTTPException as error:
            await reply.write(_event({"error": {"message": error.text, "code": error.status}}))
        else:
            await reply.write(_event(answer.message(sent)))
            await reply.write(_event({"choices": [], "usage": answer.usage()}))
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def abort(self, http: web.Request) -> web.Response:
        """Ends the requests with these ids, or all; each answers with its part."""
        names = (await _body(http)).get("request_ids")
        chosen = [j for j in self.jobs if not names or j.request.request_id in names]
        count = await self.worker.call(self.worker.abort, chosen)
        return web.json_response({"status": "aborted", "aborted": count})

    # pauses and weights ---------------------------------------------------------------------------

    async def pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in protocol.PAUSE_MODES.values():
            raise ProtocolError(f"pause: mode {mode!r}, expected wait, keep or abort")
        clear = http.query.get("clear_cache", "true").lower() == "true"
        loop = asyncio.get_running_loop()
        paused = asyncio.Event()
        told = lambda: loop.call_soon_threadsafe(paused.set)  # noqa: E731
        await self.worker.call(self.worker.pause, mode, clear, told)
        await paused.wait()
        return web.json_response({"status": "paused"})

    async def resume(self, http: web.Request) -> web.Response:
        async with self._updates:
            await self.worker.call(self.worker.resume)
        return web.json_response({"status": "resumed"})

    async def is_paused(self, http: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.worker.state == "paused"})

    async def init_transfer(self, http: web.Request) -> web.Response:
        """Nothing to do: each update says where its weights come from."""
        return web.json_response({"message": "Weight transfer initialized"})

    async def shutdown_transfer(self, http: web.Request) -> web.Response:
        async with self._updates:
            self.staged.drop()
        return web.json_response({"message": "Weight transfer shut down"})

    async def start(self, http: web.Request) -> web.Response:
        async with self._updates:
            await self.worker.call(self.worker.need_paused, "start_weight_update")
            self.staged.start()
        return web.json_response({"message": "Weight update started"})

    async def update(self, http: web.Request) -> web.Response:
        """Receives all weights while the engine keeps and serves its own."""
        info = (await _body(http)).get("update_info")
        if not isinstance(info, dict):
            raise ProtocolError("update_weights: no update_info, expected an object")
        async with self._updates:
            await asyncio.to_thread(self.staged.update, info)
        return web.json_response({"message": "Weights updated"})

    async def finish(self, http: web.Request) -> web.Response:
        """Loads what came."""
        version = (await _body(http)).get("weight_version")
        if not isinstance(version, str) or not (version.isascii() and version.isdigit()):
            raise ProtocolError(f"finish_weight_update: version {version!r}, expected a number")
        async with self._updates:
            info, tensors = self.staged.finish(int(version))
            await self.worker.call(self.worker.load, tensors, info.version, info.only)
        return web.json_response({"message": "Weight update finished"})

    async def weight_info(self, http: web.Request) -> web.Response:
        version = self.engine.version
        return web.json_response({"weight_version": None if version is None else str(version)})

    async def reset(self, http: web.Request) -> web.Response:
        running = http.query.get("reset_running_requests", "false").lower() == "true"
        success = await self.worker.call(self.worker.reset, running)
        return web.json_response({"success": success})

    async def rpc(self, http: web.Request) -> web.Response:
        """`guard.RPC_METHODS` alone, as a list of one result."""
        body = await _body(http)
        if body.get("method") == "identity":
            return web.json_response({"results": [self.identity]})
        (names,) = body.get("args") or [None]
        digests = await self.worker.call(self.engine.checksums, names)
        return web.json_response({"results": [digests]})

    # what it tells --------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.worker.is_alive() else 503)

    async def metrics(self, http: web.Request) -> web.Response:
        """In Prometheus' form, under vLLM's names."""
        running = self.worker.rows
        counts = self.worker.counts
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        numbers = {
            "vllm:num_requests_running gauge": running,
            "vllm:num_requests_waiting gauge": len(self.jobs) - running,
            "vllm:prompt_tokens_total counter": counts["prompt"],
            "vllm:generation_tokens_total counter": counts["generation"],
            "vllm:prefix_cache_hits_total counter": counts["cached"],
            "vllm:request_success_total counter": counts["answers"],
            'vllm:cache_config_info{block_size="1"} gauge': 1,
            "process_resident_memory_peak_bytes gauge": memory,
        }
        lines: list[str] = []
        for name, value in numbers.items():
            series, kind = name.rsplit(" ", 1)
            lines += [f"# TYPE {series.partition('{')[0]} {kind}", f"{series} {value}"]
        return web.Response(text="\n".join(lines) + "\n")


def _whole(job: Job) -> Answer:
    if isinstance(job.answer, Answer):
        return job.answer
    raise web.HTTPInternalServerError(text=str(job.answer))


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


async def _body(http: web.Request) -> dict[str, Any]:
    """The JSON object in a body of bounded size; of no body, an empty one."""
    data = await http.read()
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{http.path}: a body that is no JSON, {error}") from None
    if not isinstance(body, dict):
        raise ProtocolError(f"{http.path}: {type(body).__name__}, expected an object")
    return body


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """400 for a wrong request, 409 at a wrong time, 500 for what fails; each says why."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status = error.status
        why = error.text or error.reason
    except (ProtocolError, ValueError) as error:
        status = 400
        why = str(error)
    except Refused as error:
        status = 409
        why = str(error)
    except (TransferError, RuntimeError) as error:
        status = 500
        why = str(error)
    return web.json_response({"error": {"message": why, "code": status}}, status=status)


async def serve(server: Server, listening: socket.socket, keys: guard.Keys | None) -> None:
    """Serve until SIGTERM or SIGINT; prints the address once it does."""
    runner = web.AppRunner(
        server.application(keys), handler_cancellation=True, access_log=None, shutdown_timeout=1
    )
    await runner.setup()
    await web.SockSite(runner, listening).start()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server.worker.start()
    host, port = listening.getsockname()[:2]
    print(f"http://{host}:{port}", flush=True)
    await ended.wait()
    server.worker.stop()
    await runner.cleanup()


def main() -> int:
    parser = plan_parser("pyrl_ext.rollout.remote.embedded", __doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: the kernel chooses one")
    options, plan = parse_plan(parser, None)
    if plan is None:
        return 2
    if PARENT in os.environ:
        end_with(int(os.environ[PARENT]))
    keys = guard.Keys.of(keys_folder(plan), options.host)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    listening = socket.create_server((options.host, options.port), backlog=1024)
    engine = build_in_this_process(plan, torch.device(plan.device))
    assert isinstance(engine, HFEngine)  # a rule says so
    server = Server(engine, max_tokens(plan), identity_of(plan))
    asyncio.run(serve(server, listening, keys))
    sys.stdout.flush()
    os._exit(0)  # its thread may be within a forward


if __name__ == "__main__":
    sys.exit(main())
