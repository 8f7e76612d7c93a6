"""The compiled extension, and what all native backends need from it."""

import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyrl_ext.ops._op import refuse_dtype
from pyrl_ext.ops.tensors import on_gpu


class Outdated:
    """Takes the place of an extension that was built from other sources: every use raises."""

    def __init__(self, reason: str):
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self._reason)


def sources_hash(root: Path) -> str | None:
    """Hash of ``csrc`` in ``root`` as CMakeLists.txt computes it; None: no sources are there."""
    if not (root / "csrc/common/sources.cpp").exists():
        return None  # an installed wheel, whose extension and Python files come together
    files = (f for f in (root / "csrc").rglob("*") if f.suffix in (".cpp", ".hpp", ".cu"))
    listing = sorted(
        (file.relative_to(root).as_posix(), sha256(file.read_bytes()).hexdigest()) for file in files
    )
    text = "".join(f"{digest}  {name}\n" for name, digest in listing)
    return sha256(text.encode()).hexdigest()[:12]


def loaded(extension: Any, root: Path) -> Any:
    """``extension``, or an `Outdated` if it was not built from ``csrc`` in ``root``."""
    expected = sources_hash(root)
    found = getattr(extension, "sources", "older sources")
    if expected in (None, found):
        return extension
    return Outdated(
        f"{extension.__file__}: built from {found}, expected {expected}, the hash of "
        f"{root / 'csrc'}; kernels and Python code may not fit each other. Build it again with: "
        "pip install ."
    )


_found: Any = None
_missing = ""
try:
    from pyrl_ext import _C  # type: ignore[attr-defined]

    _found = loaded(_C, Path(__file__).parents[2])
    if _found is _C:
        _found.auto_isa()  # a ValueError where PYRL_ISA names what this processor does not have
except ImportError as error:
    _missing = f"pyrl_ext._C is not built ({error})"
    warnings.warn(
        f"{_missing}: operators run their torch reference, 5 to 20 times slower. Build it with: "
        "pip install .",
        RuntimeWarning,
        stacklevel=2,
    )
C: Any = _found


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


def check_extension() -> None:
    """Raises: RuntimeError if the extension was built from other sources."""
    if C is not None:
        C.auto_isa()


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
        if on_gpu(tensor) and not hasattr(C, "gather_rows_cuda"):
            return "pyrl_ext._C was built without CUDA"
        return f"there is no {tensor.device.type} kernel"
    return None


def refuses(function: str, *dtypes: torch.dtype) -> Callable[..., str | None]:
    """``refuse`` of a backend whose first argument has one of ``dtypes``; none given: any."""

    def refuse(first: Tensor, *_: Any) -> str | None:
        reason = refuse_dtype("the first argument", first, *dtypes) if dtypes else None
        return reason or refuse_device(first, function)

    return refuse


def address(tensor: Tensor | None) -> int:
    """Address of the first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def launch(function: str, device: torch.device, isa: str | None = None, **call: Any) -> Any:
    """Call ``<function>_<device>`` of the extension.

    Args:
        isa: instruction set on a CPU, for functions that have several.
        call: arguments besides the stream of a GPU, the threads and ``isa`` of a CPU.

    Returns: the function's result.
    """
    if on_gpu(device):
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            return getattr(C, f"{function}_cuda")(**call, stream=stream)
    if isa is not None:
        call["isa"] = isa
    return getattr(C, f"{function}_cpu")(**call, threads=threads())


def threads() -> int:
    """CPU threads a kernel may use: torch's setting."""
    return torch.get_num_threads()
