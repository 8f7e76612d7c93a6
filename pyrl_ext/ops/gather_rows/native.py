from math import prod
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads
from pyrl_ext.ops.on_gpu import on_gpu

from .reference import out_of_range


def refuse(src: Tensor, *rest: Tensor | None) -> str | None:
    return refuse_device(src, "gather_rows")


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> Tensor:
    src = rows_of(src)
    rows = rows.contiguous()
    fill = None if fill is None else fill.contiguous()
    out = src.new_empty(rows.shape[0], *src.shape[1:])
    field = C.Field(
        src=src.data_ptr(),
        stride=src.stride(0) * src.element_size(),
        out=out.data_ptr(),
        row_bytes=prod(src.shape[1:]) * src.element_size(),
        fill=0 if fill is None else fill.data_ptr(),  # 0: a pattern of zeros
    )
    launch("gather_rows", [field], src.shape[0], rows)
    return out


def rows_of(tensor: Tensor) -> Tensor:
    """``tensor`` if each of its rows is contiguous (at any stride), otherwise a copy."""
    if tensor.is_contiguous() or (len(tensor) and tensor[0].is_contiguous()):
        return tensor
    return tensor.contiguous()


def launch(function: str, fields: list[Any], num_src: int, rows: Tensor) -> None:
    """Gather ``rows`` (contiguous) of every ``C.Field`` on the device of ``rows``."""
    call = dict(fields=fields, rows=rows.data_ptr(), num_out=rows.shape[0])
    if on_gpu(rows):
        with torch.cuda.device(rows.device):
            C.gather_rows_cuda(**call, stream=torch.cuda.current_stream().cuda_stream)
        return
    bad = C.gather_rows_cpu(**call, num_src=num_src, threads=threads())
    if bad >= 0:
        raise out_of_range(function, rows, bad, num_src)


def refuse_invert(rows: Tensor, num_src: int) -> str | None:
    return refuse_device(rows, "invert_rows")


def invert_rows(rows: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
    rows = rows.contiguous()
    starts = rows.new_empty(num_src + 1)
    order = torch.empty_like(rows)
    bad = C.invert_rows_cpu(
        rows=rows.data_ptr(),
        num_in=rows.shape[0],
        num_out=num_src,
        starts=starts.data_ptr(),
        order=order.data_ptr(),
    )
    if bad >= 0:
        raise out_of_range("invert_rows", rows, bad, num_src)
    return starts, order
