from math import prod
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, refuse_device, threads
from pyrl_ext.ops.gather_rows.native import rows_of
from pyrl_ext.ops.on_gpu import on_gpu

from .reference import wrong_entries


def refuse(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> str | None:
    return refuse_device(src, "sum_rows")


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor, isa: str = "auto") -> Tensor:
    src = rows_of(src)
    starts = starts.contiguous()
    order = order.contiguous()
    out = src.new_empty(starts.shape[0] - 1, *src.shape[1:])
    args = arguments(src, starts, order, out)
    if on_gpu(src):
        with torch.cuda.device(src.device):
            C.sum_rows_cuda(args=args, stream=torch.cuda.current_stream().cuda_stream)
    elif (bad := C.sum_rows_cpu(args=args, isa=isa, threads=threads())) >= 0:
        raise wrong_entries(bad, starts, order, len(src))
    return out


def arguments(src: Tensor, starts: Tensor, order: Tensor, out: Tensor) -> Any:
    """``C.SumRowsArgs``; every tensor but ``src`` is contiguous."""
    return C.SumRowsArgs(
        src=src.data_ptr(),
        dtype=dtype_of(src),
        num_in=src.shape[0],
        columns=prod(src.shape[1:]),
        stride=src.stride(0) * src.element_size(),
        starts=starts.data_ptr(),
        order=order.data_ptr(),
        num_out=out.shape[0],
        out=out.data_ptr(),
    )
