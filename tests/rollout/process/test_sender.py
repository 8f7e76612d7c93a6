"""Tensors on their way to readers, by both transports."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.rollout.process.sender import Kind, LocalBroadcast, Reader, Sender

pytestmark = pytest.mark.multiprocess


def tensors(seed: int) -> list[tuple[str, Tensor]]:
    """Tensors of all kinds and sizes."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for i in range(60):
        shape = torch.randint(0, 12, (int(torch.randint(0, 4, (), generator=g)),), generator=g)
        value = torch.randn(shape.tolist(), generator=g)
        dtype = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8)[i % 5]
        value = (value * 50).to(dtype)
        found.append((f"tensor {i}", value.transpose(0, -1) if value.dim() else value))
    return [*found, ("large", torch.randn(2000, generator=g)), found[0]]


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("size", [1, 500, 1 << 20])
@pytest.mark.parametrize("kind", ["shm", "broadcast"])
def test_send_gives_every_tensor_to_every_reader(kind: Kind, size: int, readers: int):
    sender = Sender(kind, size, readers)
    got: list[list[tuple[str, Tensor]]] = [[] for _ in range(readers)]
    there: dict[int, Reader] = {}  # a process has one; here they are threads

    def read(i: int) -> None:
        reader = there[i] = there.get(i) or Reader(sender.incoming.address)
        got[i] = []
        for name, tensor in reader.tensors():
            time.sleep(5e-4 * i)  # its bucket must not be filled again meanwhile
            got[i].append((name, tensor.clone()))

    for seed in range(3):
        _ = sender.incoming
        threads = [threading.Thread(target=read, args=(i,)) for i in range(readers)]
        for thread in threads:
            thread.start()
        sent = tensors(seed)
        sender.send(iter(sent), wait)
        for thread in threads:
            thread.join()
        for mine in got:
            assert [name for name, _ in mine] == [name for name, _ in sent]
            for (_, a), (_, b) in zip(mine, sent, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
        largest = max(size, *(t.nbytes for _, t in sent))
        assert all(len(buffer) <= largest for buffer in sender.buffers)
    sender.drop()


def listening() -> list[str]:
    """Addresses, as the kernel writes them, of this process's sockets that take connections."""
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    mine = {os.readlink(link)[8:-1] for link in links if link.is_symlink()}
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path("/proc/self/net", family).read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine]


def test_broadcast_listens_on_the_loopback_only():
    """Another host reaches none of its sockets, over which names travel pickled."""
    before = listening()
    sender = LocalBroadcast(torch.device("cpu"), 2)
    reader = LocalBroadcast(torch.device("cpu"), 2, 1, sender.port)
    memory = torch.zeros(100, dtype=torch.uint8)
    thread = threading.Thread(target=lambda: reader.start(memory).wait())
    thread.start()
    sender.start(torch.ones(100, dtype=torch.uint8)).wait()
    thread.join()
    assert memory.all()
    found = listening()
    for address in before:
        found.remove(address)
    assert len(found) == 3 and {*found} == {"0100007F"}
    sender.close()
    reader.close()


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, ran: Path):
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.ran}",)


def greeting(message: bytes) -> tuple[bytes, threading.Thread]:
    """The address of a socket whose first message is ``message``, and the thread behind it."""
    door = socket.socket(socket.AF_UNIX)
    door.bind("")
    door.listen()

    def greet() -> None:
        reader, _ = door.accept()
        with Connection(reader.detach()) as connection, contextlib.suppress(BrokenPipeError):
            connection.send_bytes(message)
        door.close()

    thread = threading.Thread(target=greet)
    thread.start()
    return door.getsockname(), thread


def test_Reader_unpickles_no_first_message(tmp_path: Path):
    address, thread = greeting(pickle.dumps(Planted(tmp_path / "ran")))
    with pytest.raises(ValueError):
        Reader(address)
    thread.join()
    assert not (tmp_path / "ran").exists() and address not in Reader.connected


def test_Reader_and_Sender_refuse_another_user(monkeypatch: pytest.MonkeyPatch):
    """The kernel says who is at the other end; here this process asks as if it were another."""
    mine = os.getuid()
    sender = Sender("shm", 100)
    address = sender.incoming.address
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(RuntimeError, match=f"belongs to user {mine}, expected {mine + 1}"):
        Reader(address)
    waits = list[int]()

    def once(ends: Any) -> Any:
        waits.append(len(ends))
        if len(waits) > 1:
            raise RuntimeError("the sender waits for another reader")
        return wait(ends)

    with pytest.raises(RuntimeError, match="waits for another reader"):
        sender.send(iter(tensors(0)), once)
    sender.drop()
