"""What all Triton backends need to know before they import Triton."""

import os
from importlib.util import find_spec

from torch import Tensor


def refuse_device(name: str, tensor: Tensor) -> str | None:
    """Why Triton cannot run on the device of the argument ``name``, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"{name} is on {tensor.device}, expected cuda"
    return None
