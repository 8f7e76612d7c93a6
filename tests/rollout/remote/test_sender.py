"""One stream of weights to several engines over sockets: whole, or the old ones; within limits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.rollout.remote import wire
from pyrl_ext.rollout.remote.broadcast import BROKEN, Broadcast, ToAll
from pyrl_ext.rollout.remote.receiver import Receiver
from pyrl_ext.rollout.remote.relay import Relay, Way, meet
from pyrl_ext.rollout.remote.sender import Transfer
from pyrl_ext.rollout.remote.staged import BEFORE, Door, StagedUpdate, UpdateInfo, _from_before
from tests.helpers.deadline import DEADLINE

BUCKET = 1 << 20
IN_GROUP = {"host": "h", "port": 1, "rank": 2, "size": 3}
SHAPES = {f"layers.{i}.w": (200, 300 + i) for i in range(40)}
NOT_OURS = "192.0.2.1"  # of no host: for documentation
FEWER = dict(list(SHAPES.items())[:20])


def weights(seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    for i, (name, shape) in enumerate(SHAPES.items()):
        yield name, torch.randn(shape, generator=g).to((torch.float32, torch.bfloat16)[i % 2])


def same(found: dict[str, Tensor], seed: int = 0, keep: Callable[[str], bool] = bool) -> bool:
    sent = {name: tensor for name, tensor in weights(seed) if keep(name)}
    return found.keys() == sent.keys() and all(torch.equal(found[n], t) for n, t in sent.items())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


def engine_at(number: int) -> str:
    return f"http://127.0.0.1:{number + 1}"


@contextmanager
def transfer(
    loop: asyncio.AbstractEventLoop,
    engines: int,
    limit: float = DEADLINE,
    wanted: dict[str, tuple[int, ...]] = SHAPES,
    only: tuple[str, ...] | None = None,
    **how: Any,
) -> Iterator[tuple[Transfer, list[dict[str, Any]]]]:
    """It, and the info for each engine."""
    names = [engine_at(number) for number in range(engines)]
    part = {name: wanted[name] for name in only or wanted}
    sending = Transfer(loop, names, 7, part, limit, bucket_bytes=BUCKET, **how)
    try:
        places = asyncio.run_coroutine_threadsafe(sending.open(), loop).result()
        doors = [(Door(0, *place),) for place in places]
        infos = [UpdateInfo(door, n, 7, DEADLINE, only) for n, door in enumerate(doors)]
        yield sending, [info.to_json() for info in infos]
    finally:
        asyncio.run_coroutine_threadsafe(sending.close(), loop).result()


def engine(
    info: dict[str, Any], wanted: dict[str, tuple[int, ...]] = SHAPES, device: str = "cpu"
) -> dict[str, Tensor]:
    staged = StagedUpdate(wanted, device)
    staged.start()
    staged.update(info)
    return staged.finish(7)[1]


def test_send_gives_every_engine_all_tensors_within_two_buffers(loop: asyncio.AbstractEventLoop):
    with ThreadPoolExecutor(3) as pool:
        for seed in range(2):
            with transfer(loop, 3) as (sending, infos):
                came = [pool.submit(engine, infos[i]) for i in range(3)]
                sending.send(weights(seed))
                assert all(same(each.result(), seed) for each in came)
                assert sending.failed == {}
                assert sum(b.numel() for b in sending._buffers) <= 2 * BUCKET
                assert sending.sent_bytes > 3 * sum(t.nbytes for _, t in weights())


def test_send_leaves_out_what_engines_do_not_hold(loop: asyncio.AbstractEventLoop):
    def keep(name: str) -> bool:
        return int(name.split(".")[1]) % 3 != 1

    wanted = {name: shape for name, shape in SHAPES.items() if keep(name)}
    with ThreadPoolExecutor(1) as pool, transfer(loop, 1, wanted=wanted) as (sending, infos):
        came = pool.submit(engine, infos[0], wanted)
        sending.send(weights())
        assert same(came.result(), keep=keep)


def test_send_goes_on_without_an_engine_that_fails(loop: asyncio.AbstractEventLoop):
    """One never comes, one leaves in the middle, one stops reading; the others get everything."""
    with ThreadPoolExecutor(4) as pool, transfer(loop, 5, limit=1.0) as (sending, infos):
        stalled, gone = (joined(infos[i]) for i in (1, 2))
        good = [pool.submit(engine, infos[i]) for i in (0, 4)]
        threading.Timer(0.05, gone.close).start()
        sending.send(weights())
        assert all(same(each.result()) for each in good)
        assert sending.failed.keys() == {engine_at(1), engine_at(2), engine_at(3)}
        assert (
            "layers." in sending.failed[engine_at(1)]
            and "within its 1 s" in sending.failed[engine_at(1)]
        )
        assert "did not connect within 1 s" in sending.failed[engine_at(3)]
        stalled.close()


@pytest.mark.parametrize("how", [{"relay": 0}, {"relay": 2}, {"broadcast": True}])
def test_send_sends_every_byte_once(loop: asyncio.AbstractEventLoop, how: dict[str, Any]):
    """Engines pass them on, or the sender broadcasts them."""
    payload = sum(tensor.nbytes for _, tensor in weights())
    with ThreadPoolExecutor(3) as pool, transfer(loop, 3, **how) as (sending, infos):
        came = [pool.submit(engine, info) for info in infos]
        sending.send(weights())
        assert all(same(each.result()) for each in came)
        assert sending.failed == {}
        assert payload < sending.sent_bytes < 1.1 * payload
        if sending._to_all is not None:  # what it took is off the time for all buckets
            assert 0 < sending._to_all._left < DEADLINE


@pytest.mark.parametrize("how", [{"relay": 0}, {"broadcast": True}])
def test_send_passes_by_an_engine_that_is_not_there(
    loop: asyncio.AbstractEventLoop, how: dict[str, Any]
):
    with ThreadPoolExecutor(2) as pool, transfer(loop, 3, **how) as (sending, infos):
        loop.call_soon_threadsafe(sending.fail, 1, "it is gone")
        came = [pool.submit(engine, infos[i]) for i in (0, 2)]
        sending.send(weights())
        assert all(same(each.result()) for each in came)
        assert sending.failed == {engine_at(1): "it is gone"}


def test_engine_names_the_one_before_that_left(loop: asyncio.AbstractEventLoop):
    """Those before it have their weights, those after it none of its bytes."""
    with ThreadPoolExecutor(3) as pool, transfer(loop, 4, relay=0) as (sending, infos):
        came = [pool.submit(engine, infos[i]) for i in (0, 2, 3)]
        gone = joined(infos[1])  # nothing is at its relay's port
        sending.send(weights())
        assert same(came[0].result())
        for each in came[1:]:
            with pytest.raises(wire.WireError, match=f"{BEFORE} at 127.0.0.1:.* rank 0 of the"):
                each.result()
        gone.close()


def test_broadcast_breaks_for_all_engines_at_once(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
):
    """One leaves in the middle, one never joins; none has new weights, and all say so."""
    with ThreadPoolExecutor(3) as pool, transfer(loop, 3, broadcast=True) as (sending, infos):
        came = [pool.submit(engine, infos[i], (SHAPES, FEWER)[i == 1]) for i in range(3)]
        sending.send(weights())
        with pytest.raises(wire.WireError, match=r"'layers\.20\.w', expected a tensor"):
            came[1].result()
        for each in (came[0], came[2]):
            with pytest.raises(wire.WireError, match=r"(an end|the broadcast) .*rank 0 of the"):
                each.result()
        assert len(sending.failed) == 3 and "missed layers." in sending.failed[engine_at(0)]
        assert all(BROKEN in why for why in sending.failed.values())
    monkeypatch.setattr("pyrl_ext.rollout.remote.broadcast.JOIN", 0.5)
    with ThreadPoolExecutor(3) as pool, transfer(loop, 3, broadcast=True) as (sending, infos):
        came = [pool.submit(engine, infos[i]) for i in (0, 2)]
        absent = joined(infos[1])
        sending.send(weights())
        assert all(BROKEN in why and "first tensor" in why for why in sending.failed.values())
        for each in came:
            with pytest.raises(wire.WireError, match=BROKEN):
                each.result()
        absent.close()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2,
    reason="NCCL refuses two members of a group on one GPU",
)
@pytest.mark.parametrize("wanted", [SHAPES, FEWER])
def test_broadcast_by_nccl(loop: asyncio.AbstractEventLoop, wanted: dict[str, tuple[int, ...]]):
    """An engine on another GPU has the weights; one that leaves in the middle ends the sender's."""
    how = {"broadcast": True, "device": "cuda:0"}
    with ThreadPoolExecutor(1) as pool, transfer(loop, 1, limit=20.0, **how) as (sending, infos):
        came = pool.submit(engine, infos[0], wanted, "cuda:1")
        sending.send(weights())
        if wanted is SHAPES:
            assert same(came.result()) and not sending.failed
        else:
            with pytest.raises(wire.WireError, match=r"'layers\.20\.w', expected a tensor"):
                came.result()
            assert BROKEN in sending.failed[engine_at(0)]


def test_broadcast_names_an_engine_that_left_before_it_joined(loop: asyncio.AbstractEventLoop):
    """Nobody waits for it."""
    with ThreadPoolExecutor(1) as pool, transfer(loop, 2, broadcast=True) as (sending, infos):
        came = pool.submit(engine, infos[0])
        joined(infos[1]).close()
        sending.send(weights())
        assert f"{engine_at(1)}: it left" in sending.failed[engine_at(0)]
        with pytest.raises(wire.WireError):
            came.result()


def test_broadcast_sends_a_bucket_in_pieces(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
):
    for room in ("wire", "broadcast"):
        monkeypatch.setattr(f"pyrl_ext.rollout.remote.{room}.CHUNK", BUCKET // 16)
    with ThreadPoolExecutor(2) as pool, transfer(loop, 2, broadcast=True) as (sending, infos):
        came = [pool.submit(engine, info) for info in infos]
        sending.send(weights())
        assert all(same(each.result()) for each in came) and sending.failed == {}


def test_broadcast_has_a_limit_for_all_buckets(loop: asyncio.AbstractEventLoop):
    with ThreadPoolExecutor(1) as pool, transfer(loop, 1, broadcast=True) as (sending, infos):
        came = pool.submit(engine, infos[0])
        assert sending._to_all is not None
        sending._to_all._left = 0.0
        sending.send(weights())
        assert "it took too long" in sending.failed[engine_at(0)]
        with pytest.raises(wire.WireError):
            came.result()


def test_broadcast_waits_where_engines_of_other_hosts_reach_it():
    """A loopback address is of this host's engines alone."""
    for hosts, failed in ((("127.0.0.1",), False), (("127.0.0.1", NOT_OURS), True)):
        engines = [Receiver(engine_at(n), 1.0, host) for n, host in enumerate(hosts)]
        to_all = ToAll(torch.device("cpu"), 1.0)
        to_all.meet(engines, 1.0)
        to_all.close()
        assert all(failed == (BROKEN in (each.error or "")) for each in engines)
        if not failed:  # engines wait longer than the sender, which so decides
            assert b'"silence":2.0,' in engines[0].first


def test_broadcast_by_nccl_needs_engines_on_gpus():
    way = Way("127.0.0.1", 1, backend="nccl", rank=1, size=2)
    with pytest.raises(wire.WireError, match="a broadcast by NCCL to cpu, expected an engine on"):
        Broadcast(way, torch.device("cpu"), lambda: None)


def test_relay_lets_only_the_next_engine_in():
    with closing(Relay("127.0.0.1")) as relay:
        relay.begin(Way(next_secret="s"))
        with ExitStack() as stack:
            stranger = Way("127.0.0.1", relay.port, "other")
            with pytest.raises(wire.WireError, match=f"no connection .*{BEFORE}"):
                _from_before(stranger, 0, stack, [])
            read = _from_before(Way("127.0.0.1", relay.port, "s", silence=0.1), 0, stack, [])
            relay.pass_on(memoryview(b"weights"))
            read(memoryview(found := bytearray(7)))
            assert found == b"weights"
            with pytest.raises(wire.WireError, match=rf"sent nothing for 0\.1 s.*{BEFORE}"):
                read(memoryview(bytearray(1)))


def test_relay_waits_for_a_stranger_no_longer_than_for_a_whole_proof(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("pyrl_ext.rollout.remote.relay.ADMIT", 0.3)
    with closing(Relay("127.0.0.1")) as relay, ExitStack() as stack:
        relay.begin(Way(next_secret="s", silence=DEADLINE))
        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", relay.port)))
        left = threading.Event()

        def drip() -> None:  # 70 bytes, each well within the time
            with suppress(OSError):
                while not left.wait(0.2):
                    stranger.send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        _from_before(Way("127.0.0.1", relay.port, "s"), 0, stack, [])  # raises unless let in
        left.set()
        dripping.join()


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"host": 1},
        {"port": True},
        {"host": "h"},
        {"silence": -1},
        {"backend": "gloo"},
        {"backend": "mpi", **IN_GROUP},
        {"backend": 1},
        *({"backend": "gloo", **IN_GROUP, "rank": rank} for rank in (0, 3, -1)),
        {"backend": "gloo", **IN_GROUP, "host": ""},
        {"backend": "gloo", **IN_GROUP, "size": 1025},
    ],
)
def test_way_refuses_other_fields(change: dict[str, Any]):
    assert Way.from_json(asdict(Way()) | {"backend": "gloo", **IN_GROUP}).size == 3
    with pytest.raises(wire.WireError, match="expected"):
        Way.from_json(asdict(Way()) | change)


def joined(info: dict[str, Any]) -> socket.socket:
    """A connection that proved its secret and reads nothing more."""
    known = UpdateInfo.from_json(info)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    door = known.doors[0]
    connection.connect((door.host, door.port))
    connection.settimeout(DEADLINE)
    meet(connection, door.secret, known.engine, port=1)
    return connection


def test_send_lets_nobody_in_without_the_secret(loop: asyncio.AbstractEventLoop):
    with ThreadPoolExecutor(1) as pool, transfer(loop, 1) as (sending, infos):
        info = infos[0]
        _, host, port, _ = info["doors"][0]
        for wrong in ({"doors": [[0, host, port, "other"]]}, {"engine": 1}, {"engine": 9999}):
            with pytest.raises(wire.WireError, match="an end after 0 of 32 bytes"):
                engine(info | wrong)
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
            stranger.settimeout(DEADLINE)
            greeting = stranger.recv(1000)
            assert greeting.startswith(wire.MAGIC) and len(greeting) == 16 + wire.PROOF
            with suppress(ConnectionResetError):
                assert not stranger.recv(1000)
        came = pool.submit(engine, info)
        sending.send(weights())
        assert same(came.result()) and not sending.failed


def test_send_says_that_the_trainer_took_no_connection(loop: asyncio.AbstractEventLoop):
    """As without a file for it."""

    async def close() -> None:
        for door in sending._doors.values():
            door.shutdown(socket.SHUT_RDWR)

    with transfer(loop, 2) as (sending, _):
        asyncio.run_coroutine_threadsafe(close(), loop).result()
        sending.send(weights())
    assert sending.failed.keys() == {engine_at(0), engine_at(1)}
    assert all("the trainer's accept failed" in why for why in sending.failed.values())


def test_update_refuses_a_trainer_without_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as pool:
        places = (Door(0, "127.0.0.1", door.getsockname()[1], "s"),)
        came = pool.submit(engine, UpdateInfo(places, 0, 7, DEADLINE).to_json())
        connection, _ = door.accept()
        connection.sendall(wire.MAGIC + bytes(wire.PROOF))
        connection.recv(1000)
        connection.sendall(bytes(wire.PROOF))
        with pytest.raises(wire.WireError, match="a sender with another secret"):
            came.result()
        connection.close()


def test_send_that_fails_leaves_engines_without_new_weights(loop: asyncio.AbstractEventLoop):
    def broken() -> Iterator[tuple[str, Tensor]]:
        for i, each in enumerate(weights()):
            if i == 30:
                raise FloatingPointError("no more")
            yield each

    with ThreadPoolExecutor(1) as pool, transfer(loop, 1) as (sending, infos):
        came = pool.submit(engine, infos[0])
        with pytest.raises(FloatingPointError):
            sending.send(broken())
        with pytest.raises(wire.WireError, match="an end after"):
            came.result()


def test_update_names_what_the_trainer_did_not_send(loop: asyncio.AbstractEventLoop):
    fewer = dict(list(SHAPES.items())[:-1])
    for wanted, says in (
        (fewer, "'layers.39.w', expected a tensor"),
        (SHAPES, "1 tensors missing"),
    ):
        sent = SHAPES if wanted is fewer else fewer
        with ThreadPoolExecutor(1) as pool, transfer(loop, 1, wanted=sent) as (sending, infos):
            came = pool.submit(engine, infos[0], wanted)
            sending.send(weights())
            with pytest.raises(wire.WireError, match=says):
                came.result()
    more = SHAPES | {"layers.40.w": (2,), "layers.0.w": (300, 200)}
    with ThreadPoolExecutor(1) as pool, transfer(loop, 1, wanted=more) as (sending, infos):
        came = pool.submit(engine, infos[0], more)
        with pytest.raises(
            RuntimeError, match=r"2 of 41 tensors .* \['layers.0.w', 'layers.40.w'\]"
        ):
            sending.send(weights())
        with pytest.raises(wire.WireError, match=r"layers\.0\.w of shape"):
            came.result()


def test_staged_update_keeps_its_order(loop: asyncio.AbstractEventLoop):
    staged = StagedUpdate(SHAPES)
    with pytest.raises(wire.WireError, match="not started"):
        staged.update({})
    with pytest.raises(wire.WireError, match="a finish without weights"):
        staged.finish(7)
    staged.start()
    with pytest.raises(wire.WireError, match="a finish without weights"):
        staged.finish(7)
    doors = [0, "h", "1", ""], [0, 3, 1, ""], [0, "h", 1], [0, "h", 1 << 20, ""], "door"
    for change in ({"more": 1}, {"only": [1]}, {"doors": []}, *({"doors": [d]} for d in doors)):
        staged.start()
        info = UpdateInfo((Door(0, "h", 1, ""),), 0, 1, 1.0).to_json()
        with pytest.raises(wire.WireError, match="expected"):
            staged.update(info | change)
    with ThreadPoolExecutor(1) as pool:
        for version, only in ((7, None), (8, None), (7, ("layers.1.w", "layers.0.w"))):
            with transfer(loop, 1, only=only) as (sending, infos):
                staged.start()
                staged.start()  # of a trainer that came back
                came = pool.submit(staged.update, infos[0])
                sending.send(each for each in weights() if only is None or each[0] in only)
                came.result()
            if version == 8:
                with pytest.raises(wire.WireError, match="a finish of version 8, expected 7"):
                    staged.finish(version)
            else:
                assert same(staged.finish(version)[1], keep=(only or SHAPES).__contains__)
            with pytest.raises(wire.WireError, match="a finish without weights"):
                staged.finish(version)
        with transfer(loop, 1) as (sending, infos):
            staged.start()
            with pytest.raises(wire.WireError, match="'another'"):
                staged.update(infos[0] | {"only": ["another"]})


def test_update_ends_when_the_trainer_is_silent(loop: asyncio.AbstractEventLoop):
    with ThreadPoolExecutor(1) as pool, transfer(loop, 1) as (_, infos):
        info = infos[0] | {"silence": 0.1}
        with pytest.raises(wire.WireError, match=r"sent nothing for 0\.1 s"):
            pool.submit(engine, info).result()
    with pytest.raises(wire.WireError, match="is gone"):
        engine(info)
