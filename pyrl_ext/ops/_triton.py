"""Helpers of all Triton backends, without importing Triton."""

import os
from importlib.util import find_spec

from torch import Tensor

from pyrl_ext.ops.on_gpu import on_gpu


def refuse_device(name: str, tensor: Tensor) -> str | None:
    """Why Triton cannot run on the device of the argument ``name``, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if not on_gpu(tensor) and os.environ.get("TRITON_INTERPRET") != "1":
        return f"{name} is on {tensor.device}, expected cuda"
    return None
