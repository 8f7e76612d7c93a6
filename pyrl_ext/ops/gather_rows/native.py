from math import prod
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, address, launch, refuses
from pyrl_ext.ops.tensors import on_gpu

from . import new_output
from .inverse import out_of_range

refuse = refuses("gather_rows")


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> Tensor:
    src = rows_of(src)
    rows = rows.contiguous()
    fill = None if fill is None else fill.contiguous()
    out = new_output(src, rows, fill)
    field = C.Field(
        src=src.data_ptr(),
        stride=src.stride(0) * src.element_size(),
        out=out.data_ptr(),
        row_bytes=prod(src.shape[1:]) * src.element_size(),
        fill=address(fill),  # 0: a pattern of zeros
    )
    gather("gather_rows", [field], src.shape[0], rows)
    return out


def rows_of(tensor: Tensor) -> Tensor:
    """``tensor`` if each of its rows is contiguous (at any stride), otherwise a copy."""
    if tensor.is_contiguous() or (len(tensor) and tensor[0].is_contiguous()):
        return tensor
    return tensor.contiguous()


def gather(function: str, fields: list[Any], num_src: int, rows: Tensor) -> None:
    """Gather ``rows`` (contiguous) of every ``C.Field`` on the device of ``rows``."""
    call: dict[str, Any] = dict(fields=fields, rows=rows.data_ptr(), num_out=rows.shape[0])
    if not on_gpu(rows):
        call["num_src"] = num_src
    bad = launch("gather_rows", rows.device, **call)
    if bad is not None and bad >= 0:
        raise out_of_range(function, rows, bad, num_src)


refuse_invert_rows = refuses("invert_rows")


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
