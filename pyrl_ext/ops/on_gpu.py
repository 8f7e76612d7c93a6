"""Whether a tensor is on a GPU: the only place that knows which device types are GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

GPU_TYPES = {"cuda"}
"""Device types that behave as a GPU; the tests' double of a GPU adds its type."""


def on_gpu(of: Tensor | torch.UntypedStorage | torch.device) -> bool:
    """True if a device, or that of a tensor or storage, is a GPU."""
    device = of if isinstance(of, torch.device) else of.device
    return device.type in GPU_TYPES
