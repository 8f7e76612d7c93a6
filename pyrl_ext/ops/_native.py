"""The compiled extension, and what all native backends need from it."""

import warnings
from typing import Any

import torch
from torch import Tensor

C: Any = None
_missing = ""
try:
    from pyrl_ext import _C  # type: ignore[attr-defined]

    C = _C
    C.auto_isa()  # a ValueError where PYRL_ISA names what this processor does not have
except ImportError as error:
    _missing = f"pyrl_ext._C is not built ({error})"
    warnings.warn(
        f"{_missing}: operators run their torch reference, 5 to 20 times slower. Build it with: "
        "pip install .",
        RuntimeWarning,
        stacklevel=2,
    )


DTYPES = {  # enum class DType of csrc/common/dtype.hpp
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
}


def dtype_of(tensor: Tensor) -> Any:
    """The element type of ``tensor`` as the extension names it."""
    return getattr(C.DType, DTYPES[tensor.dtype])


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
    """CPU threads a kernel may use: torch's setting."""
    return torch.get_num_threads()
