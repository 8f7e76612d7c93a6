"""Copies from host to device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pyrl_ext.ops.tensors import to_device
from pyrl_ext.parallel.upload import Upload

CPU = torch.device("cpu")


def test_upload_on_a_cpu_copies_nothing():
    host = torch.arange(5)
    upload = Upload(CPU)
    assert upload(host) is host and to_device(host, CPU) is host and to_device(host, None) is host
    upload.arrive()


def test_upload_shares_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch):
    """Otherwise torch's allocator keeps the freed memory of each: it does not mix streams."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    first, second, other = (
        Upload(torch.device("cuda", n))
        for n in (100, 100, 101)  # of no other test
    )
    assert first._stream is second._stream and first._stream is not other._stream


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_upload_is_there_after_arrive():
    device = torch.device("cuda")
    upload = Upload(device)
    hosts = [torch.randn(1 << 20) for _ in range(20)]
    uploads = [upload(host) for host in hosts]
    upload.arrive()
    for host, there in zip(hosts, uploads, strict=True):
        assert there.device.type == "cuda" and torch.equal((there + 0).cpu(), host)


class Recorded:
    """A stream that notes what waits for what, without a GPU."""

    def __init__(self, name: str, log: list[tuple[str, ...]]):
        self.name = name
        self.log = log

    def wait_stream(self, other: Recorded) -> None:
        self.log.append((self.name, "waits for", other.name))


def test_upload_orders_its_copies_before_their_use(monkeypatch: pytest.MonkeyPatch):
    """On tensors without data: copies run on the side stream, the stream that uses them waits for
    it once, and the allocator hears of that use before the tensors may go."""
    log = list[tuple[str, ...]]()
    current = [Recorded("compute", log)]

    @contextmanager
    def entered(stream: Recorded) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if "_to_copy" in str(func):
                log.append((current[-1].name, "copies"))
            return func(*args, **(kwargs or {}))

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        log.append((current[-1].name, "pins"))
        return tensor

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Recorded("side", log))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: log.append((stream.name, "uses"))
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    with FakeTensorMode(), Copies():
        upload = Upload(torch.device("cuda", 102))  # of no other test
        for _ in range(2):
            for rows in (3, 5):
                assert upload(torch.empty(rows)).device == torch.device("cuda", 102)
            upload.arrive()
    once = [("side", "pins"), ("side", "copies")] * 2
    once += [("compute", "waits for", "side"), ("compute", "uses"), ("compute", "uses")]
    assert log == once * 2
