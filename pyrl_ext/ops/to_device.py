"""A copy from host to device that the host does not wait for."""

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device | None) -> Tensor:
    """``host`` on ``device``, through pinned memory: copies from pageable memory block the host."""
    if device is None or device.type == "cpu":
        return host
    if device.type == "meta":  # launches that only compile
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
