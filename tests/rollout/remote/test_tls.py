"""TLS between trainer and engines: calls and weights, and each end that is not the right one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from pyrl_ext.parallel.ports import absence_at
from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import embedded
from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.protocol import WEIGHT_INFO
from pyrl_ext.rollout.remote.tls import Certificate, trusting
from pyrl_ext.rollout.remote.weight_protocol import UpdateInfo
from pyrl_ext.rollout.remote.weight_receiver import StagedUpdate
from pyrl_ext.rollout.remote.weight_sender import Transfer
from tests.helpers.certificates import Authority, openssl
from tests.helpers.configs import REPOSITORY
from tests.helpers.deadline import DEADLINE
from tests.helpers.engines import GLM, checkpoint, random_model
from tests.helpers.publishing import Trainer
from tests.helpers.servers import running, served

pytestmark = pytest.mark.multiprocess

KEYS = Keys("g" * 32, "c" * 32)
HERE = ("DNS:localhost", "IP:127.0.0.1")
WEIGHTS = {"a.weight": torch.arange(40_000.0), "b.weight": torch.arange(6.0)}
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "
SHAPES = {name: tuple(value.shape) for name, value in WEIGHTS.items()}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    pair = authority.sign("engine", *HERE)
    return Certificate.read(pair.cert, pair.key)


async def info(client: Server) -> object:
    async with asyncio.timeout(DEADLINE):
        try:
            return await client.control(WEIGHT_INFO, method="GET")
        finally:
            await client.close()


# calls -------------------------------------------------------------------------------------------


def test_a_run_is_encrypted(authority: Authority, certificate: Certificate):
    """Requests, control and weights, with keys; digests are compared on both servers."""
    with ExitStack() as stack:
        engines = HFEngine(GLM), HFEngine(GLM)
        options = {"keys": KEYS, "tls": certificate.context}
        clients = [stack.enter_context(running(engine, 500, **options)) for engine in engines]
        trainer = Trainer(stack, [client.url for client in clients], KEYS)
        for server in trainer.servers:
            assert server.address.startswith("https://127.0.0.1:")
            server.tls = trusting(authority.cert)
        for version in (1, 2):
            weights = checkpoint(random_model(GLM, version))
            assert trainer.publish(weights, version, certificate=certificate).failed == {}
        expected = HFEngine(GLM)
        expected.load_weights(weights.items(), 2)
        assert [engine.checksums(None) for engine in engines] == [expected.checksums(None)] * 2
        assert [trainer.generate(server).versions for server in trainer.servers] == [
            ((0, 4, 2),)
        ] * 2


EXPECTED = "expected one that rollout.tls.ca signed for the name that is called"
WRONG = {
    "another authority": f"unable to get local issuer certificate, {EXPECTED}",
    "expired": f"certificate has expired, {EXPECTED}",
    "another name": f"certificate is not valid for '127.0.0.1', {EXPECTED}",
}


@pytest.mark.parametrize("kind", WRONG)
async def test_no_other_certificate_is_taken(kind: str, authority: Authority, tmp_path: Path):
    by = Authority(tmp_path / "other") if kind == "another authority" else authority
    hosts = ("DNS:gpu-17", "IP:10.0.0.1") if kind == "another name" else HERE
    pair = by.sign(kind.replace(" ", "-"), *hosts, expired=kind == "expired")
    tls = Certificate.read(pair.cert, pair.key).context
    trust = trusting(authority.cert)
    async with served(HFEngine(GLM), keys=KEYS, tls=tls) as there:
        found = await asyncio.to_thread(absence_at, there.url, tls=trust)
        assert found is not None and WRONG[kind] in found.reason
        with pytest.raises(ServerFailed) as caught:
            await info(Server(there.url, KEYS, tls=trust))
        text = str(caught.value)
        assert text.startswith(f"{there.url}/weight_info: the connection ended, ")
        assert WRONG[kind] in text


async def test_the_commands_of_the_page_make_files_that_work(tmp_path: Path):
    page = (REPOSITORY / "docs/remote_engines.md").read_text("utf-8").partition("### TLS")[2]
    commands = page.partition("```bash\n")[2].partition("```")[0]
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)
    folder = tmp_path / "tls"
    tls = Certificate.read(str(folder / "cert.pem"), str(folder / "key.pem")).context
    async with served(HFEngine(GLM), tls=tls) as there:
        address = there.url.replace("127.0.0.1", "localhost")
        trust = trusting(str(folder / "ca.pem"))
        assert await info(Server(address, tls=trust)) == {"weight_version": None}


async def test_both_ends_speak_tls_or_neither(authority: Authority, certificate: Certificate):
    """An end without TLS receives no key."""
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(2000))
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    trust = trusting(authority.cert)
    plain = await asyncio.start_server(hear, "127.0.0.1", 0)
    async with plain, served(HFEngine(GLM), keys=KEYS, tls=certificate.context) as there:
        address = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}"
        fault = "TLS: WRONG_VERSION_NUMBER, expected an engine that was started with rollout.tls"
        found = await asyncio.to_thread(absence_at, address, tls=trust)
        assert found is not None and fault in found.reason
        with pytest.raises(ServerFailed, match=fault):
            await info(Server(address, KEYS, tls=trust))
        assert len(heard) == 2 and all(each.startswith(b"\x16\x03") for each in heard)

        with pytest.raises(ServerFailed, match="the connection ended"):
            await info(Server(there.url.replace("https", "http"), KEYS))
        assert await asyncio.to_thread(absence_at, there.url.replace("https", "http")) is not None
        assert await info(Server(there.url, KEYS, tls=trust)) == {"weight_version": None}
        assert await asyncio.to_thread(absence_at, there.url, tls=trust) is None


async def test_a_silent_connection_is_closed(
    certificate: Certificate, authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    """Before the handshake, after it, and with half a head."""
    monkeypatch.setattr(embedded, "HEAD_S", 1.0)
    async with served(HFEngine(GLM), tls=certificate.context) as there:
        port = int(there.url.rpartition(":")[2])
        trust = trusting(authority.cert)
        for tls, said in ((None, b""), (trust, b""), (trust, HALF)):
            name = None if tls is None else "localhost"
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=tls, server_hostname=name
            )
            writer.write(said)
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        assert await info(Server(there.url, tls=trust)) == {"weight_version": None}


async def test_a_host_has_so_many_silent_connections(
    certificate: Certificate, authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    """The oldest is closed when one more is there."""
    monkeypatch.setattr(embedded, "HEAD_S", DEADLINE)
    monkeypatch.setattr(embedded, "MAX_RECENT", 2)
    trust = trusting(authority.cert)
    async with served(HFEngine(GLM), tls=certificate.context) as there:
        port = int(there.url.rpartition(":")[2])
        made: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(3):
            await asyncio.sleep(2 * embedded.LOOK_S)  # they are looked at in this order
            made.append(await asyncio.open_connection("localhost", port, ssl=trust))
        assert await asyncio.wait_for(made[0][0].read(), 60) == b""
        assert not made[1][0].at_eof()
        for _, writer in made:
            writer.close()


# weights -----------------------------------------------------------------------------------------


@pytest.fixture
def sending(certificate: Certificate) -> Iterator[tuple[Transfer, UpdateInfo]]:
    transfer = Transfer(
        ["http://127.0.0.1:9"], 7, SHAPES, DEADLINE, bucket_bytes=1 << 12, certificate=certificate
    )
    with closing(transfer):
        ((sender, _),) = transfer.open()
        yield transfer, UpdateInfo(senders=[sender], engine=0, version=7, silence=DEADLINE)


async def received(transfer: Transfer, info: UpdateInfo) -> dict[str, torch.Tensor]:
    """The tensors that an engine receives."""
    staged = StagedUpdate(SHAPES)
    staged.start()
    work = asyncio.to_thread(transfer.send, WEIGHTS.items())
    sends = asyncio.create_task(work)
    try:
        await asyncio.to_thread(staged.update, info.model_dump())
        await sends
    finally:
        transfer.fail(0, "the test ends")
        await asyncio.wait([sends])
    return staged.finish(7)[1]


async def test_weights_are_encrypted(sending: tuple[Transfer, UpdateInfo]):
    """Seen by one who passes all bytes on."""
    transfer, info = sending
    (sender,) = info.senders
    seen = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = await asyncio.open_connection(sender.host, sender.port)
        await asyncio.gather(pass_on(reader, others[1]), pass_on(others[0], writer))

    listening = await asyncio.start_server(between, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        passed = info.model_copy(update={"senders": [sender.model_copy(update={"port": port})]})
        tensors = await received(transfer, passed)
    assert {name: value.tolist() for name, value in tensors.items()} == {
        name: value.tolist() for name, value in WEIGHTS.items()
    }
    assert len(seen) > WEIGHTS["a.weight"].nbytes
    assert b"a.weight" not in seen and bytes.fromhex(sender.key) not in seen
    assert WEIGHTS["a.weight"][:9].numpy().tobytes() not in seen


async def test_an_engine_takes_weights_of_one_certificate_alone(
    sending: tuple[Transfer, UpdateInfo],
):
    """Not even of another that the authority signed; nor without TLS."""
    transfer, info = sending
    info = info.model_copy(update={"silence": 60.0})  # it would wait so long for bytes
    (sender,) = info.senders
    for digest, found in (
        ("0" * 64, "a sender with another certificate, expected the trainer's"),
        (None, "from rank 0"),
    ):
        other = sender.model_copy(update={"certificate": digest})
        staged = StagedUpdate(SHAPES)
        staged.start()
        fields = info.model_copy(update={"senders": [other]}).model_dump()
        with pytest.raises(RuntimeError, match=found):
            await asyncio.to_thread(staged.update, fields)
    assert transfer.failed == {}  # the engine itself may still come
    assert (await received(transfer, info)).keys() == WEIGHTS.keys()


async def test_a_sender_without_tls_gets_no_engine():
    with socket.create_server(("127.0.0.1", 0)) as door:
        host, port = door.getsockname()
        sender = {"rank": 0, "host": host, "port": port, "key": "0" * 64, "certificate": "0" * 64}
        fields = {"senders": [sender], "engine": 0, "version": 7, "silence": 60.0}
        staged = StagedUpdate(SHAPES)
        staged.start()
        update = asyncio.create_task(asyncio.to_thread(staged.update, fields))
        loop = asyncio.get_running_loop()
        door.setblocking(False)
        connection, _ = await loop.sock_accept(door)
        with connection:
            first = await loop.sock_recv(connection, 2000)
            await loop.sock_sendall(connection, b"pyrl weights, as anybody may write\r\n")
            with pytest.raises(RuntimeError, match="no connection to a sender by TLS"):
                await update
        assert first.startswith(b"\x16\x03") and b"pyrl weights" not in first


# files -------------------------------------------------------------------------------------------


def test_files_are_refused_that_hold_no_pair(authority: Authority, tmp_path: Path):
    one, two = (authority.sign(f"pair-{n}", *HERE) for n in (1, 2))
    empty = tmp_path / "empty"
    empty.touch(0o600)
    missing = tmp_path / "missing"
    locked = tmp_path / "locked"
    openssl("ec", "-aes128", "-passout", "pass:secret", "-in", one.key, "-out", locked)
    trusted = tmp_path / "trusted"
    openssl("x509", "-in", one.cert, "-trustout", "-out", trusted)
    for cert, key in (
        (one.cert, two.key),
        (one.cert, empty),
        (empty, one.key),
        (one.cert, missing),
        (missing, one.key),
        (one.key, one.key),
        (one.cert, locked),
        (trusted, one.key),
    ):
        with pytest.raises(
            ValueError, match=r"rollout\.tls: cert .* and key .*, expected PEM files"
        ):
            Certificate.read(str(cert), str(key))
    for ca in (empty, missing, Path(one.key), tmp_path):
        with pytest.raises(ValueError, match=r"rollout\.tls\.ca: .*, expected a PEM file"):
            trusting(str(ca))
    Path(one.key).chmod(0o640)
    with pytest.raises(ValueError, match=r"rollout\.tls\.key: .* has mode 0640, .* chmod 600"):
        Certificate.read(one.cert, one.key)
