"""Devices and dtypes of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

GPU_TYPES = {"cuda"}
"""Device types that behave as a GPU; the tests' double of a GPU adds its type."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.uint16)
}


def on_gpu(of: Tensor | torch.UntypedStorage | torch.device) -> bool:
    """True if a device, or that of a tensor or storage, is a GPU."""
    device = of if isinstance(of, torch.device) else of.device
    return device.type in GPU_TYPES


def to_device(host: Tensor, device: torch.device | None) -> Tensor:
    """``host`` on ``device``, through pinned memory: copies from pageable memory block the host."""
    if device is None or device.type == "cpu":
        return host
    if device.type == "meta":  # launches that only compile
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def dtype_of(name: str) -> torch.dtype:
    """``torch.bfloat16`` for ``bfloat16``: types of weights, and of the ids of routed experts.

    Raises: KeyError where a plan has no such type.
    """
    return _DTYPES[name]


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, log-probs and sums of gradients: float64 for float64, else
    float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
