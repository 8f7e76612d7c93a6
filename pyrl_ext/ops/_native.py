"""The compiled extension, and what every native backend asks of it."""

import warnings
from typing import Any

import torch
from torch import Tensor

C: Any = None
_missing = ""
try:
    from pyrl_ext import _C  # type: ignore[attr-defined]

    C = _C
except ImportError as error:
    _missing = f"pyrl_ext._C is not built ({error})"
    warnings.warn(
        f"{_missing}: operators run their torch reference, 5 to 20 times slower. Build it with: "
        "pip install .",
        RuntimeWarning,
        stacklevel=2,
    )


def refuse_device(tensor: Tensor, function: str) -> str | None:
    """Why ``<function>_<device>`` cannot run on ``tensor``'s device, or None."""
    if _missing:
        return _missing
    if tensor.device.type not in ("cpu", "cuda"):
        return f"the input is on {tensor.device}, expected cpu or cuda"
    if not hasattr(C, f"{function}_{tensor.device.type}"):
        if tensor.is_cuda and not hasattr(C, "gather_rows_cuda"):
            return "pyrl_ext._C was built without CUDA"
        return f"there is no {tensor.device.type} kernel"
    return None


def threads() -> int:
    """CPU threads a kernel may use: torch's own setting."""
    return torch.get_num_threads()
