from math import prod

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads
from pyrl_ext.ops.gather_rows.native import rows_of

CODES = {  # enum class Number of sum_rows.hpp
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
}


def refuse(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> str | None:
    return refuse_device(src, "sum_rows")


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor, isa: str = "auto") -> Tensor:
    src, starts, order = rows_of(src), starts.contiguous(), order.contiguous()
    out = src.new_empty(starts.shape[0] - 1, *src.shape[1:])
    task = describe(src, starts, order, out)
    if src.is_cuda:
        with torch.cuda.device(src.device):
            C.sum_rows_cuda(task, torch.cuda.current_stream().cuda_stream)
    elif (bad := C.sum_rows_cpu(task, isa, threads())) >= 0:
        at, end = int(starts[bad]), int(starts[bad + 1])
        raise IndexError(
            f"sum_rows: inverse.starts[{bad} : {bad + 2}] is [{at}, {end}] with entries "
            f"{order[at:end].tolist()[:8]}, expected rows of src in [0, {len(src)}), as "
            "invert_rows(rows, N) gives"
        )
    return out


def describe(src: Tensor, starts: Tensor, order: Tensor, out: Tensor):
    """struct Sum of sum_rows.hpp; every tensor but ``src`` is contiguous."""
    return C.Sum(
        *(src.data_ptr(), CODES[src.dtype], src.shape[0], prod(src.shape[1:])),
        *(src.stride(0) * src.element_size(), starts.data_ptr(), order.data_ptr()),
        *(out.shape[0], out.data_ptr()),
    )
