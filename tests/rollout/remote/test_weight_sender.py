"""One stream of weights to several engines over sockets: whole, or the old ones; within limits."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.rollout.remote.broadcast import BROKEN, Broadcast
from pyrl_ext.rollout.remote.weight_protocol import (
    HELLO,
    MAGIC,
    BroadcastRoute,
    SenderAddress,
    TransferError,
    UpdateInfo,
)
from pyrl_ext.rollout.remote.weight_receiver import StagedUpdate
from pyrl_ext.rollout.remote.weight_sender import BroadcastSender, EngineLink, Transfer
from tests.helpers.deadline import DEADLINE, until

BUCKET = 1 << 20
MEMBER = {"host": "h", "port": 1, "prefix": "p", "backend": "gloo", "rank": 2}
MEMBER |= {"size": 3, "silence": 1}
KEY = "0" * 64
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


def engine_at(number: int) -> str:
    return f"http://127.0.0.1:{number + 1}"


def info_of(
    sender: SenderAddress,
    number: int = 0,
    only: tuple[str, ...] | None = None,
    route: BroadcastRoute | None = None,
) -> dict[str, Any]:
    names = None if only is None else list(only)
    info = UpdateInfo(
        senders=[sender],
        engine=number,
        version=7,
        silence=DEADLINE,
        only=names,
        broadcast=route,
    )
    return info.model_dump()


@contextmanager
def transfer(
    engines: int,
    limit: float = DEADLINE,
    wanted: dict[str, tuple[int, ...]] = SHAPES,
    only: tuple[str, ...] | None = None,
    **how: Any,
) -> Iterator[tuple[Transfer, list[dict[str, Any]]]]:
    """It, and the info for each engine."""
    names = [engine_at(number) for number in range(engines)]
    part = {name: wanted[name] for name in only or wanted}
    sending = Transfer(names, 7, part, limit, bucket_bytes=BUCKET, **how)
    try:
        ways = enumerate(sending.open())
        yield sending, [info_of(way.sender, n, only, way.route) for n, way in ways]
    finally:
        sending.close()


def engine(
    info: dict[str, Any], wanted: dict[str, tuple[int, ...]] = SHAPES, device: str = "cpu"
) -> dict[str, Tensor]:
    staged = StagedUpdate(wanted, device)
    staged.start()
    staged.update(info)
    return staged.finish(7)[1]


def test_send_gives_every_engine_all_tensors_within_two_buffers():
    with ThreadPoolExecutor(3) as pool:
        for seed in range(2):
            with transfer(3) as (sending, infos):
                came = [pool.submit(engine, infos[i]) for i in range(3)]
                sending.send(weights(seed))
                assert all(same(each.result(), seed) for each in came)
                assert sending.failed == {}
                assert sum(b.numel() for b in sending._buffers) <= 2 * BUCKET
                assert sending.sent_bytes > 3 * sum(t.nbytes for _, t in weights())


def test_send_leaves_out_what_engines_do_not_hold():
    def keep(name: str) -> bool:
        return int(name.split(".")[1]) % 3 != 1

    wanted = {name: shape for name, shape in SHAPES.items() if keep(name)}
    with ThreadPoolExecutor(1) as pool, transfer(1, wanted=wanted) as (sending, infos):
        came = pool.submit(engine, infos[0], wanted)
        sending.send(weights())
        assert same(came.result(), keep=keep)


def test_send_goes_on_without_an_engine_that_fails():
    """One never comes, one leaves in the middle, one stops reading; the others get everything."""
    with ThreadPoolExecutor(4) as pool, transfer(5, limit=6.0) as (sending, infos):
        stalled, gone = (joined(infos[i]) for i in (1, 2))
        good = [pool.submit(engine, infos[i]) for i in (0, 4)]
        threading.Timer(0.05, gone.close).start()
        sending.send(weights())
        assert all(same(each.result()) for each in good)
        assert sending.failed.keys() == {engine_at(1), engine_at(2), engine_at(3)}
        assert (
            "layers." in sending.failed[engine_at(1)]
            and "within its 6 s" in sending.failed[engine_at(1)]
        )
        assert "did not connect within 6 s" in sending.failed[engine_at(3)]
        stalled.close()


def test_broadcast_sends_every_byte_once():
    payload = sum(tensor.nbytes for _, tensor in weights())
    with ThreadPoolExecutor(3) as pool, transfer(3, broadcast=True) as (sending, infos):
        came = [pool.submit(engine, info) for info in infos]
        sending.send(weights())
        assert all(same(each.result()) for each in came)
        assert sending.failed == {}
        assert payload < sending.sent_bytes < 1.1 * payload
        assert sending._broadcast is not None  # its time is off the time for all buckets
        assert 0 < sending._broadcast._left < DEADLINE


def test_broadcast_breaks_for_all_engines_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    """One leaves in the middle, one never joins; none has new weights, and all say so."""
    with ThreadPoolExecutor(3) as pool, transfer(3, broadcast=True) as (sending, infos):
        came = [pool.submit(engine, infos[i], (SHAPES, FEWER)[i == 1]) for i in range(3)]
        sending.send(weights())
        with pytest.raises(TransferError, match=r"'layers\.20\.w', expected a tensor"):
            came[1].result()
        for each in (came[0], came[2]):
            with pytest.raises(TransferError, match=r"(an end|the broadcast) .*rank 0 of the"):
                each.result()
        assert len(sending.failed) == 3 and "missed layers." in sending.failed[engine_at(0)]
        assert all(BROKEN in why for why in sending.failed.values())
    monkeypatch.setattr("pyrl_ext.rollout.remote.broadcast.JOIN_TIMEOUT_S", 0.5)
    with ThreadPoolExecutor(3) as pool, transfer(3, broadcast=True) as (sending, infos):
        came = [pool.submit(engine, infos[i]) for i in (0, 2)]
        absent = joined(infos[1])
        sending.send(weights())
        assert all(BROKEN in why and "first tensor" in why for why in sending.failed.values())
        for each in came:
            with pytest.raises(TransferError, match=BROKEN):
                each.result()
        absent.close()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2,
    reason="NCCL refuses two members of a group on one GPU",
)
@pytest.mark.parametrize("wanted", [SHAPES, FEWER])
def test_broadcast_by_nccl(wanted: dict[str, tuple[int, ...]]):
    """An engine on another GPU has the weights; one that leaves in the middle ends the sender's."""
    how = {"broadcast": True, "device": "cuda:0"}
    with ThreadPoolExecutor(1) as pool, transfer(1, limit=20.0, **how) as (sending, infos):
        came = pool.submit(engine, infos[0], wanted, "cuda:1")
        sending.send(weights())
        if wanted is SHAPES:
            assert same(came.result()) and not sending.failed
        else:
            with pytest.raises(TransferError, match=r"'layers\.20\.w', expected a tensor"):
                came.result()
            assert BROKEN in sending.failed[engine_at(0)]


def test_broadcast_waits_where_engines_of_other_hosts_reach_it():
    """A loopback address is of this host's engines alone."""
    for hosts, failed in ((("127.0.0.1",), False), (("127.0.0.1", NOT_OURS), True)):
        links = [EngineLink(engine_at(n), 1.0) for n, _ in enumerate(hosts)]
        for link, host in zip(links, hosts, strict=True):
            link.host = host
        sender = BroadcastSender(links, torch.device("cpu"), 1.0)
        with pytest.raises(OSError) if failed else nullcontext():
            # engines wait longer than the sender, which so decides
            assert [route.silence for route in sender.open(1.0)] == [2.0]
        sender.close()


def test_broadcast_by_nccl_needs_engines_on_gpus():
    route = BroadcastRoute.model_validate(MEMBER | {"backend": "nccl"})
    with pytest.raises(TransferError, match="a broadcast by NCCL to cpu, expected an engine on"):
        Broadcast(route, torch.device("cpu"), lambda: None)


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"host": 1},
        {"host": ""},
        {"port": True},
        {"port": 1 << 16},
        {"silence": -1},
        {"backend": "mpi"},
        {"rank": -1},
        {"size": 1025},
    ],
)
def test_route_refuses_other_fields(change: dict[str, Any]):
    assert BroadcastRoute.parse(json.dumps(MEMBER).encode()).size == 3
    with pytest.raises(TransferError, match="expected"):
        BroadcastRoute.parse(json.dumps(MEMBER | change).encode())


def joined(info: dict[str, Any], connection: socket.socket | None = None) -> socket.socket:
    """A connection that sent its key and reads nothing more."""
    (sender,) = info["senders"]
    connection = connection or socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((sender["host"], sender["port"]))
    connection.settimeout(DEADLINE)
    connection.sendall(HELLO.pack(MAGIC, info["engine"], bytes.fromhex(sender["key"])))
    return connection


def test_send_lets_nobody_in_without_the_key():
    with ThreadPoolExecutor(1) as pool, transfer(1) as (sending, infos):
        info = infos[0]
        (sender,) = info["senders"]
        for wrong in ({"senders": [sender | {"key": KEY}]}, {"engine": 1}, {"engine": 9999}):
            with pytest.raises(TransferError, match="an end after 0 of 12 bytes"):
                engine(info | wrong)
        with socket.create_connection((sender["host"], sender["port"])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n".ljust(HELLO.size))
            stranger.settimeout(DEADLINE)
            assert not stranger.recv(1000)
        came = pool.submit(engine, info)
        sending.send(weights())
        assert same(came.result()) and not sending.failed


def test_send_says_that_the_trainer_took_no_connection():
    """As without a file for it."""

    with transfer(2) as (sending, _):
        for door in sending._doors.values():
            door.shutdown(socket.SHUT_RDWR)
        sending.send(weights())
    assert sending.failed.keys() == {engine_at(0), engine_at(1)}
    assert all("the trainer's accept failed" in why for why in sending.failed.values())


def test_send_waits_for_an_open_file():
    """Strangers may hold all that the trainer may open, until they are turned away."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = list[int]()
    with transfer(1) as (sending, infos), socket.socket() as stranger, socket.socket() as one:
        met = sending._links[0].met
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, before[1]))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            # a thread that waits in accept already has a file for the first that connects
            (sender,) = infos[0]["senders"]
            stranger.connect((sender["host"], sender["port"]))
            joined(infos[0], one)
            assert not met.wait(0.5)
            while held:
                os.close(held.pop())
            assert met.wait(DEADLINE) and not sending.failed
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in held:
                os.close(number)


def test_update_names_what_the_trainer_did_not_send():
    fewer = dict(list(SHAPES.items())[:-1])
    for wanted, says in (
        (fewer, "'layers.39.w', expected a tensor"),
        (SHAPES, "1 tensors missing"),
    ):
        sent = SHAPES if wanted is fewer else fewer
        with ThreadPoolExecutor(1) as pool, transfer(1, wanted=sent) as (sending, infos):
            came = pool.submit(engine, infos[0], wanted)
            sending.send(weights())
            with pytest.raises(TransferError, match=says):
                came.result()
    more = SHAPES | {"layers.40.w": (2,), "layers.0.w": (300, 200)}
    with ThreadPoolExecutor(1) as pool, transfer(1, wanted=more) as (sending, infos):
        came = pool.submit(engine, infos[0], more)
        with pytest.raises(
            RuntimeError, match=r"2 of 41 tensors .* \['layers.0.w', 'layers.40.w'\]"
        ):
            sending.send(weights())
        with pytest.raises(TransferError, match=r"layers\.0\.w of shape"):
            came.result()


def test_staged_update_keeps_its_order():
    staged = StagedUpdate(SHAPES)
    with pytest.raises(TransferError, match="not started"):
        staged.update({})
    with pytest.raises(TransferError, match="a finish without weights"):
        staged.finish(7)
    staged.start()
    with pytest.raises(TransferError, match="a finish without weights"):
        staged.finish(7)
    sender = SenderAddress(rank=0, host="h", port=1, key=KEY)
    good = sender.model_dump()
    senders = [good | change for change in ({"port": "1"}, {"host": 3}, {"port": 1 << 20})]
    changes = [{"senders": [wrong]} for wrong in (*senders, "door", {"rank": 0})]
    for change in ({"more": 1}, {"only": [1]}, {"senders": []}, *changes):
        staged.start()
        with pytest.raises(TransferError, match="expected"):
            staged.update(info_of(sender) | change)
    with ThreadPoolExecutor(1) as pool:
        for version, only in ((7, None), (8, None), (7, ("layers.1.w", "layers.0.w"))):
            with transfer(1, only=only) as (sending, infos):
                staged.start()
                staged.start()  # of a trainer that came back
                came = pool.submit(staged.update, infos[0])
                sending.send(each for each in weights() if only is None or each[0] in only)
                came.result()
            if version == 8:
                with pytest.raises(TransferError, match="a finish of version 8, expected 7"):
                    staged.finish(version)
            else:
                assert same(staged.finish(version)[1], keep=(only or SHAPES).__contains__)
            with pytest.raises(TransferError, match="a finish without weights"):
                staged.finish(version)
        with transfer(1) as (sending, infos):
            staged.start()
            with pytest.raises(TransferError, match="'another'"):
                staged.update(infos[0] | {"only": ["another"]})


def test_an_update_that_ends_late_brings_nothing():
    """A trainer left; its update ends after the next trainer's update has arrived."""
    staged = StagedUpdate(SHAPES)
    with (
        ThreadPoolExecutor(2) as pool,
        transfer(1) as (late, late_infos),
        transfer(1) as (sending, infos),
    ):
        staged.start()
        stale = pool.submit(staged.update, late_infos[0])
        until(lambda: not staged._started)  # it receives
        staged.start()
        came = pool.submit(staged.update, infos[0])
        sending.send(weights(1))
        came.result()
        late.send(weights(2))
        with pytest.raises(TransferError, match="an update that was dropped"):
            stale.result()
    assert same(staged.finish(7)[1], 1)


def test_update_ends_when_the_trainer_is_silent():
    with ThreadPoolExecutor(1) as pool, transfer(1) as (_, infos):
        info = infos[0] | {"silence": 0.1}
        with pytest.raises(TransferError, match=r"sent nothing for 0\.1 s"):
            pool.submit(engine, info).result()
    with pytest.raises(TransferError, match="no connection to a sender"):
        engine(info)
