"""Copies from host to device that run beside the compute."""

from __future__ import annotations

from collections.abc import Iterable
import torch
from torch import Tensor



def to_device(host: Tensor, device: torch.device | None) -> Tensor:
    """``host`` on ``device`` by way of pinned memory: copies from other memory wait."""
    if device is None or device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Upload:
    """Copies on a stream of their own; on a CPU nothing is copied.

    Between uploads and their use stands `arrive`. The pinned memory of a copy and the device memory
    of its result are kept from being given away early by torch's allocators.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: list[Tensor] = []

    def __call__(self, host: Tensor) -> Tensor:
        """``host``, pinned already or not, on the device; to be used after `arrive`."""
        if self._stream is None:
            return host
        with torch.cuda.stream(self._stream):
            there = to_device(host, self.device)
        self._under_way.append(there)
        return there

    def arrive(self) -> None:
        """What the current stream does from here on finds all uploads; the host does not wait."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in self._under_way:
            tensor.record_stream(current)
        self._under_way.clear()
