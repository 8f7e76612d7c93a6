"""Helpers of all Triton backends, without importing Triton."""

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from pyrl_ext.ops.on_gpu import on_gpu

# The name of a kernel's launch, with the sizes it is compiled for, and a call with so many rows.
Launch = tuple[str, Callable[[int], object]]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data, for launches that only compile."""
    return torch.empty(shape, dtype=dtype, device="meta")


def short(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def refuse_device(name: str, tensor: Tensor) -> str | None:
    """Why Triton cannot run on the device of the argument ``name``, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if not on_gpu(tensor) and os.environ.get("TRITON_INTERPRET") != "1":
        return f"{name} is on {tensor.device}, expected cuda"
    return None
