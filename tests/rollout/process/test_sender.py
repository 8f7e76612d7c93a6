"""Tensors on their way to readers, by both transports."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

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
