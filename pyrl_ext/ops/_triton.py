"""Helpers of all Triton backends, without importing Triton."""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from pyrl_ext.ops._op import refuses_first
from pyrl_ext.ops.on_gpu import on_gpu


def refuse_device(name: str, tensor: Tensor) -> str | None:
    """Why Triton cannot run on the device of the argument ``name``, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if not on_gpu(tensor) and os.environ.get("TRITON_INTERPRET") != "1":
        return f"{name} is on {tensor.device}, expected cuda"
    return None


def refuses(name: str, *dtypes: torch.dtype) -> Callable[..., str | None]:
    """``refuse`` of a backend whose first argument, ``name``, has one of ``dtypes``; none: any."""
    return refuses_first(name, dtypes, partial(refuse_device, name))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (max(n, 1) - 1).bit_length()
