"""Copies from host to device."""

import pytest
import torch

from pyrl_ext.dist.upload import Upload, to_device

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
