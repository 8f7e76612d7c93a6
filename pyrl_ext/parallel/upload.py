"""Copies from host to device that overlap with compute."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu, to_device


@cache
def _stream_of(device: torch.device) -> Any:
    """One stream a device: torch's allocator keeps freed memory for the stream that it was
    allocated on, and with a new stream a pass would keep the copies of many passes."""
    return torch.get_device_module(device).Stream(device)


class Upload:
    """Host-to-device copies on a separate stream; on a CPU nothing is copied.

    Call `arrive` between uploading tensors and using them. Until then the device tensors are kept
    alive, so that torch's allocators reuse neither them nor their pinned sources too early.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = _stream_of(device) if on_gpu(device) else None
        self._in_flight: list[Tensor] = []

    def __call__(self, host: Tensor) -> Tensor:
        """``host``, pinned already or not, on the device; use it only after `arrive`."""
        if self._stream is None:
            return host
        with torch.get_device_module(self.device).stream(self._stream):
            there = to_device(host, self.device)
        self._in_flight.append(there)
        return there

    def arrive(self) -> None:
        """Make the current stream wait for all uploads; the host does not wait."""
        if self._stream is None:
            return
        current = torch.get_device_module(self.device).current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in self._in_flight:
            tensor.record_stream(current)
        self._in_flight.clear()
