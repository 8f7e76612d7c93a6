"""No key leaves the trainer, and no server is used that does not prove that it knows the key."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import embedded_worker
from pyrl_ext.rollout.remote.auth import CHALLENGE, PROOF, Guard, Keys, proof_of
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.embedded import EmbeddedServer
from pyrl_ext.rollout.remote.protocol import HEALTH, PAUSE, RESUME, WEIGHT_INFO, Partial
from tests.helpers.deadline import DEADLINE
from tests.helpers.engines import GLM, checkpoint, engine_of, random_model
from tests.helpers.http_engine import request_of
from tests.helpers.publishing import Trainer
from tests.helpers.servers import running

pytestmark = pytest.mark.multiprocess

KEYS = Keys("g" * 32, "c" * 32)
LOCAL = "127.0.0.1"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()
    return f"http://{host}:{port}"


def port_of(listening: socket.socket) -> int:
    return listening.getsockname()[1]


class Counting(EmbeddedServer):
    """Counts calls of two paths; the first waits for `proves`."""

    def __init__(self, engine: HFEngine):
        super().__init__(engine, 500)
        self.asked = 0
        self.resumed = 0
        self.proves = asyncio.Event()
        self.proves.set()

    async def health(self, http: web.Request) -> web.Response:
        self.asked += 1
        await self.proves.wait()
        return await super().health(http)

    async def resume(self, http: web.Request) -> web.Response:
        self.resumed += 1
        return await super().resume(http)


@asynccontextmanager
async def engine_at(
    listening: socket.socket, address: str | None = None, engine: HFEngine | None = None
) -> AsyncIterator[Counting]:
    """An engine's server; ``address``: by which it knows that it is called."""
    server = Counting(engine or HFEngine(GLM))
    async with server.listens(listening, Guard(KEYS, address)):
        server.worker.start()
        yield server
        server.worker.stop()


@asynccontextmanager
async def client_of(address: str, silence: float = DEADLINE) -> AsyncIterator[Server]:
    client = Server(address, KEYS, silence)
    yield client
    await client.close()


async def version_at(client: Server) -> object:
    """The answer to a call that needs the key."""
    return await client.control(WEIGHT_INFO, method="GET")


@dataclass
class Impostor:
    """Keeps what it hears.

    Attributes:
        heard: (path, headers) of each call
    """

    answer: Answer
    heard: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    @asynccontextmanager
    async def at(self, listening: socket.socket) -> AsyncIterator[None]:
        async def hear(http: web.Request) -> web.StreamResponse:
            self.heard.append((http.path, dict(http.headers)))
            return await self.answer(http)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hear)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        yield
        await runner.cleanup()

    def has_no_key(self) -> bool:
        heard = str(self.heard)
        return bool(self.heard) and str(KEYS.control) not in heard and "Bearer" not in heard


def passing_on(address: str, host: str | None = None) -> Answer:
    """Gives another server the call, and returns its answer.

    Args:
        host: the name in it; None: that of the caller
    """

    async def answer(http: web.Request) -> web.Response:
        headers = dict(http.headers)
        if host is not None:
            headers["Host"] = host
        url = address + http.path_qs
        async with (
            aiohttp.ClientSession() as session,
            session.request(http.method, url, headers=headers, data=await http.read()) as reply,
        ):
            proof = {PROOF: reply.headers[PROOF]} if PROOF in reply.headers else {}
            return web.Response(status=reply.status, body=await reply.read(), headers=proof)

    return answer


# who knows the key -------------------------------------------------------------------------------


async def test_a_token_alone_opens_a_server_and_no_key_is_sent():
    """Seen by one who passes all calls on, between a trainer and a server that does not know its
    address: the port is the same."""
    listening = socket.create_server((LOCAL, 0))
    port = port_of(listening)
    between = socket.create_server(("127.0.0.2", port))
    sniffer = Impostor(passing_on(address_of(listening)))
    async with engine_at(listening) as server, sniffer.at(between):
        async with client_of(address_of(between)) as client:
            assert await client.control(f"{PAUSE}?mode=abort") == {"status": "paused"}
            assert await client.control(RESUME) == {"status": "resumed"}
            assert await version_at(client) == {"weight_version": None}
        assert server.resumed == 1
    assert [path for path, _ in sniffer.heard] == [HEALTH, PAUSE, RESUME, WEIGHT_INFO]
    tokens = {headers["Authorization"] for _, headers in sniffer.heard[1:]}
    assert len(tokens) == 1 and "Authorization" not in sniffer.heard[0][1]
    assert not re.search("[gc]{32}", str(sniffer.heard))
    challenges = [headers[CHALLENGE] for _, headers in sniffer.heard]
    assert len({*challenges}) == 4

    # what was heard opens nothing once the server is started again, nor at another one
    again, other = (socket.create_server((LOCAL, n)) for n in (port, 0))
    async with engine_at(again), engine_at(other), aiohttp.ClientSession() as session:
        for door in (again, other):
            for host in (f"127.0.0.2:{port}", address_of(door)[7:]):
                headers = {"Authorization": next(iter(tokens)), "Host": host}
                url = address_of(door) + RESUME
                async with session.post(url, headers=headers) as reply:
                    assert reply.status == 401


async def test_a_server_that_is_started_again_gets_another_token():
    """A call that comes to it with the token of before does nothing, and is made once more."""
    listening = socket.create_server((LOCAL, 0))
    address = address_of(listening)
    async with client_of(address) as client:
        async with engine_at(listening, address):
            await client.control(RESUME)
        again = socket.create_server((LOCAL, int(address.rpartition(":")[2])))
        async with engine_at(again, address) as server:
            await client.control(RESUME)
            await client.control(RESUME)
            assert server.resumed == 2 and server.asked == 0


async def test_the_trainers_requests_have_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded_worker, "MAX_REQUESTS", 0)  # of others
    listening = socket.create_server((LOCAL, 0))
    address = address_of(listening)
    engine = engine_of(random_model(GLM), GLM)
    async with engine_at(listening, address, engine), client_of(address) as client:
        answer = await client.generate(request_of(1), Partial(request_of(1)))
    assert len(answer.token_ids) == 12


def test_publish_needs_no_key_on_the_wire():
    with ExitStack() as stack:
        engines = HFEngine(GLM), HFEngine(GLM)
        clients = [stack.enter_context(running(engine, 500, keys=KEYS)) for engine in engines]
        trainer = Trainer(stack, [client.url for client in clients], KEYS)
        for version in (1, 2):
            assert trainer.publish(checkpoint(random_model(GLM, version)), version).failed == {}
        assert engines[0].checksums(None) == engines[1].checksums(None)
        assert [trainer.generate(server).versions for server in trainer.servers] == [
            ((0, 4, 2),)
        ] * 2


async def test_several_servers_prove_themselves_once():
    async with AsyncExitStack() as stack:
        pairs: list[tuple[Counting, Server]] = []
        for _ in range(3):
            listening = socket.create_server((LOCAL, 0))
            address = address_of(listening)
            server = await stack.enter_async_context(engine_at(listening, address))
            pairs.append((server, await stack.enter_async_context(client_of(address))))
        await asyncio.gather(*(version_at(client) for _, client in pairs for _ in range(8)))
        assert [server.asked for server, _ in pairs] == [1, 1, 1]


async def test_a_proof_outlives_the_call_that_began_it():
    listening = socket.create_server((LOCAL, 0))
    address = address_of(listening)
    async with engine_at(listening, address) as server, client_of(address) as client:
        server.proves.clear()
        calls = [asyncio.create_task(version_at(client)) for _ in range(3)]
        while not server.asked:
            await asyncio.sleep(0.01)
        calls[0].cancel()
        server.proves.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [{"weight_version": None}] * 2
        assert server.asked <= 2  # the second call begins anew


# who does not ------------------------------------------------------------------------------------


async def test_who_passes_challenges_on_is_refused():
    """To a server that knows its address, also under its name; and to one with another port."""
    listening, third = (socket.create_server((LOCAL, 0)) for _ in range(2))
    port = port_of(listening)
    same_port = socket.create_server(("127.0.0.2", port))
    address = address_of(listening)
    async with engine_at(listening, address), engine_at(third):
        for door, answer, found in (
            (same_port, passing_on(address), f"421 .*127.0.0.2:{port} is called, expected {LOCAL}"),
            (None, passing_on(address, address[7:]), "200 with a wrong proof"),
            (None, passing_on(address_of(third)), "421 .*expected a name with port"),
        ):
            impostor = Impostor(answer)
            door = door or socket.create_server((LOCAL, 0))
            shown = address_of(door)
            async with impostor.at(door), client_of(shown) as client:
                with pytest.raises(ServerFailed, match=found) as caught:
                    await version_at(client)
            assert shown in str(caught.value) and "no key was sent" in str(caught.value)
            assert impostor.has_no_key() and [path for path, _ in impostor.heard] == [HEALTH]


def answers(status: int = 200, proof: str | None = None, **headers: str) -> Answer:
    async def answer(http: web.Request) -> web.Response:
        given = {} if proof is None else {PROOF: proof}
        return web.Response(status=status, text="hello", headers=given | headers)

    return answer


async def with_another_key(http: web.Request) -> web.Response:
    number = "a" * 64
    proof = proof_of("x" * 32, http.headers["Host"], http.headers[CHALLENGE], number)
    return web.Response(headers={PROOF: proof})


async def hangs(http: web.Request) -> web.Response:
    await asyncio.sleep(DEADLINE)
    return web.Response()


async def stalls(http: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse(status=404, headers={"Content-Length": "900"})
    await reply.prepare(http)
    await asyncio.sleep(DEADLINE)
    return reply


OLD = r"without a proof that it knows the control key, expected the header .*older version"
WRONG = r"/health: 200 with a wrong proof .*rollout\.keys, or another program"
IMPOSTORS: dict[str, tuple[Answer, str]] = {
    "no proof": (answers(), f"/health: 200 {OLD}"),
    "an old server": (answers(404), f"/health: 404 hello {OLD}"),
    "stalls": (stalls, "/health: 404 without a proof that it knows the control key"),
    "elsewhere": (answers(307, Location="http://127.0.0.1:9/"), f"/health: 307 hello {OLD}"),
    "another key": (with_another_key, WRONG),
    "wrong": (answers(proof=f"{'a' * 64} {'0' * 64}"), WRONG),
    "short": (answers(proof="a b"), WRONG),
    "empty": (answers(proof=""), WRONG),
    "no digits": (answers(proof="é ü"), WRONG),
    "too long": (answers(proof="a" * 100_000), "/weight_info: the connection ended, .*400"),
    "silence": (hangs, "/health: no answer within 0.5 s"),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
async def test_an_impostor_gets_no_key(kind: str):
    answer, found = IMPOSTORS[kind]
    impostor = Impostor(answer)
    listening = socket.create_server((LOCAL, 0))
    silence = 0.5 if kind == "silence" else DEADLINE
    async with impostor.at(listening), client_of(address_of(listening), silence) as client:
        for _ in range(2):
            with pytest.raises(ServerFailed, match=found) as caught:
                await version_at(client)
            assert str(caught.value).startswith(address_of(listening))
        if kind != "silence":  # requests have their own limit
            with pytest.raises(ServerFailed):
                await client.generate(request_of(1), Partial(request_of(1)))
    assert impostor.has_no_key() and {path for path, _ in impostor.heard} == {HEALTH}


async def test_who_takes_the_port_of_a_dead_server_gets_no_key():
    """It gets a token of the dead process, until its first answer; then a challenge alone."""
    listening = socket.create_server((LOCAL, 0))
    address = address_of(listening)
    impostor = Impostor(answers())
    async with client_of(address) as client:
        async with engine_at(listening, address):
            await version_at(client)
        taken = socket.create_server((LOCAL, int(address.rpartition(":")[2])))
        async with impostor.at(taken):
            for _ in range(2):
                with pytest.raises(ServerFailed, match=OLD):
                    await version_at(client)
    assert [path for path, _ in impostor.heard] == [WEIGHT_INFO, HEALTH]
    assert str(KEYS.control) not in str(impostor.heard)
    assert "Authorization" not in impostor.heard[1][1]


@pytest.mark.parametrize("ends", ["refused", "taken out"])
async def test_a_server_that_failed_is_proven_again(ends: str):
    listening = socket.create_server((LOCAL, 0))
    address = address_of(listening)
    impostor = Impostor(answers())
    async with client_of(address) as client:
        async with engine_at(listening, address):
            await version_at(client)
        if ends == "refused":
            with pytest.raises(ServerFailed, match="the connection ended"):
                await version_at(client)
        else:
            client.fail("silent")
        taken = socket.create_server((LOCAL, int(address.rpartition(":")[2])))
        async with impostor.at(taken):
            with pytest.raises(ServerFailed, match=OLD):
                await version_at(client)
    assert impostor.has_no_key() and [path for path, _ in impostor.heard] == [HEALTH]


@pytest.mark.parametrize("challenge", ["", "a", "A" * 64, "a" * 65, "a" * 8000, "é" * 64])
async def test_a_server_answers_no_odd_challenge(challenge: str):
    listening = socket.create_server((LOCAL, 0))
    async with engine_at(listening), aiohttp.ClientSession() as session:
        for path in (HEALTH, WEIGHT_INFO):
            url = address_of(listening) + path
            headers = {CHALLENGE: challenge}
            async with session.get(url, headers=headers) as reply:
                assert reply.status == 400 and PROOF not in reply.headers
                assert "expected 64 hex digits" in await reply.text()


async def test_a_server_without_keys_proves_nothing():
    """A trainer with keys does not use it, nor one without keys a server that has some."""
    listening, locked = (socket.create_server((LOCAL, 0)) for _ in range(2))
    server = Counting(HFEngine(GLM))
    async with server.listens(listening, Guard(Keys())), engine_at(locked):
        async with client_of(address_of(listening)) as client:
            with pytest.raises(ServerFailed, match=r"started without rollout\.keys"):
                await version_at(client)
        without = Server(address_of(locked))
        with pytest.raises(ServerFailed, match=r"401 .*no valid key"):
            await version_at(without)
        await without.close()


async def test_who_knows_the_key_may_send_it_too():
    """Programs of others, with either key."""
    listening = socket.create_server((LOCAL, 0))
    async with engine_at(listening), aiohttp.ClientSession() as session:
        for key, status in ((KEYS.control, 200), (KEYS.generate, 200), ("x" * 32, 401)):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.get(address_of(listening) + WEIGHT_INFO, headers=headers) as reply:
                assert reply.status == status and PROOF not in reply.headers
