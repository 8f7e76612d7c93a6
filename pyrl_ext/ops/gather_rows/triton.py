import os
from importlib.util import find_spec

from torch import Tensor


def refuse(src: Tensor, rows: Tensor, fill: Tensor) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if not src.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"src is on {src.device}, expected cuda"
    return None


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    from .triton_kernel import gather_rows_kernel  # triton takes a while to import

    src, rows, fill = src.contiguous(), rows.contiguous(), fill.contiguous()
    out = src.new_empty(rows.numel(), src.shape[1])
    if out.numel() == 0:
        return out
    columns = src.shape[1]
    block = min(1024, 1 << (columns - 1).bit_length())
    grid = (rows.numel(), -(-columns // block))
    gather_rows_kernel[grid](src, rows, fill, out, columns, BLOCK=block)  # type: ignore[arg-type]
    return out
