"""The client against a small server that speaks the protocol, rightly and in every wrong way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.parallel.ports import absence_at
from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.client import Refused, Server, ServerFailed
from pyrl_ext.rollout.remote.protocol import Partial, Request
from tests.helpers.http_engine import HttpEngine, Messages, request_of, tokens_of


@asynccontextmanager
async def client(engine: HttpEngine, **fields: Any) -> AsyncIterator[Server]:
    """A client of the server."""
    server = Server(engine.address, **fields)
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def pair(**fields: Any) -> AsyncIterator[tuple[HttpEngine, Server]]:
    """A server and a client of it."""
    with HttpEngine() as engine:
        async with client(engine, **fields) as server:
            yield engine, server


async def test_generate_returns_the_whole_answer():
    request = request_of(1, budget=9)
    part = Partial(request)
    async with pair() as (engine, server):
        answer = await server.generate(request, part)
    assert list(answer.token_ids) == tokens_of(request) == part.token_ids
    assert answer.finish_reason == "length" and answer.versions == ((0, 9, 1),)
    assert answer.routes is not None and len(answer.routes) == 3 + 9 - 1
    assert engine.asked == [request]


async def test_generate_keeps_the_tokens_of_a_server_that_dies():
    request = request_of(1)
    part = Partial(request)
    async with pair() as (engine, server):
        engine.dies = 5
        with pytest.raises(ServerFailed, match="ended after 5 tokens"):
            await server.generate(request, part)
    assert part.token_ids == tokens_of(request)[:5] and len(part.logprobs) == 5


# no token at all, and none after some
@pytest.mark.parametrize("after", [0, 4])
async def test_generate_gives_up_a_server_that_hangs(after: int):
    """It answers on /health all the time."""
    part = Partial(request_of(1))
    async with pair(silence=3.0) as (engine, server):
        engine.hangs_after = after
        with pytest.raises(ServerFailed, match=f"no token for 3 s, after {after} of"):
            await server.generate(request_of(1), part)
        assert len(part.token_ids) == after and server.failure is not None
        with pytest.raises(ServerFailed, match="no token for"):
            await server.generate(request_of(2), Partial(request_of(2)))
        assert await asyncio.to_thread(absence_at, server.address) is None


async def test_generate_waits_longer_for_a_server_that_generates_for_others():
    async with pair(silence=3.0) as (engine, server):
        engine.hangs_after = 0
        engine.busy = True
        waiting = asyncio.ensure_future(server.generate(request_of(1), Partial(request_of(1))))
        await asyncio.sleep(4)
        assert server.failure is None
        engine.hangs_after = None
        await waiting


async def test_generate_is_patient_while_weights_are_published():
    async with pair(silence=3.0) as (engine, server):
        engine.hangs_after = 3
        server.paused = True
        waiting = asyncio.ensure_future(server.generate(request_of(1), Partial(request_of(1))))
        await asyncio.sleep(4)
        server.paused = False
        engine.hangs_after = None
        await waiting


NONSENSE: dict[str, tuple[Callable[[Request, Messages], list[Any]], str]] = {
    "an error inside a 200": (lambda r, m: [*m[:3], {"error": {"message": "dead"}}], "dead"),
    "tokens without end": (lambda r, m: [*m[:-1]] * 9, "tokens, expected at most"),
    "no JSON": (lambda r, m: [b"data: {what}\n\n"], "JSON"),
    "deep JSON": (lambda r, m: [b"data: " + b"[" * 50_000 + b"\n\n"], "JSON"),
    "no DONE": (lambda r, m: [*m, None], r"\[DONE\]"),
    "text": (lambda r, m: [b"data: [1, 2]\n\n"], "an object"),
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_generate_refuses_nonsense(kind: str):
    request = request_of(1)
    async with pair() as (liar, server):
        liar.twist, message = NONSENSE[kind]
        with pytest.raises(ServerFailed, match=message) as caught:
            await server.generate(request, Partial(request))
        assert liar.address in str(caught.value)


async def test_generate_refuses_no_http():
    """Something else listens at the address."""

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"220 mail ready\r\n\r\n")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(shout, "127.0.0.1", 0)
    server = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    with pytest.raises(ServerFailed):
        await server.generate(request_of(1), Partial(request_of(1)))
    absence = await asyncio.to_thread(absence_at, server.address)
    assert absence is not None and absence.is_taken
    assert "no HTTP answer" in absence.reason and f"(pid {os.getpid()})" in absence.reason
    await server.close()
    listening.close()


async def test_generate_tells_a_wrong_request_from_a_failed_server():
    async with pair() as (engine, server):
        for status, error in ((400, Refused), (500, ServerFailed), (404, ServerFailed)):
            engine.status = status
            with pytest.raises(error, match=f"{status} .*because"):
                await server.generate(request_of(1), Partial(request_of(1)))
        assert server.failure is None  # the router decides


async def test_generate_gives_up_its_request_when_it_is_cancelled():
    async with pair() as (engine, server):
        engine.seconds = 0.02
        request = request_of(1, budget=10_000)
        task = asyncio.ensure_future(server.generate(request, Partial(request)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.running:
            await asyncio.sleep(0.01)


async def test_control_reads_the_body():
    async with pair() as (engine, server):
        assert await server.control("/pause?mode=abort") == {"success": True}
        with pytest.raises(ServerFailed, match=r"/no: .*False.*expected success"):
            await server.control("/no")
        with pytest.raises(ServerFailed, match="no answer within"):
            await server.control("/slow", timeout=0.1)
    assert engine.controls["/pause"] == 1


async def test_keys_are_read_from_files_and_open_a_server(tmp_path: Path):
    for name in ("generate", "control"):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(f"{name}-{'0' * 32}\n")
    keys = Keys.read(tmp_path)
    assert keys == Keys(f"generate-{'0' * 32}", f"control-{'0' * 32}") and Keys.read(None) == Keys()
    with HttpEngine(keys=keys) as engine:
        async with client(engine, keys=keys) as right:
            await right.generate(request_of(1), Partial(request_of(1)))
            await right.control("/pause")
        async with client(engine, keys=Keys(keys.control, keys.generate)) as wrong:
            with pytest.raises(ServerFailed, match="/health: 200 with a wrong proof"):
                await wrong.generate(request_of(1), Partial(request_of(1)))
            with pytest.raises(ServerFailed, match="/health: 200 with a wrong proof"):
                await wrong.control("/pause")
        assert len(engine.asked) == 1 and engine.controls["/pause"] == 1
    (tmp_path / "control").unlink()
    with pytest.raises(ValueError, match=r"rollout.keys: .*control, .*expected a file with a key"):
        Keys.read(tmp_path)
