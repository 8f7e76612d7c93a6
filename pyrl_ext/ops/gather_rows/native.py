import torch
from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads

from .reference import out_of_range

# src, stride, out, row_bytes, fill, pattern: struct Field of gather_rows.hpp
Field = tuple[int, int, int, int, int, int]


def refuse(src: Tensor, *rest: Tensor | None) -> str | None:
    return refuse_device(src, "gather_rows")


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor, *inverse: Tensor | None) -> Tensor:
    src, rows, fill = rows_of(src), rows.contiguous(), fill.contiguous()
    out = src.new_empty(rows.shape[0], *src.shape[1:])
    row_bytes = fill.numel() * src.element_size()
    stride = src.stride(0) * src.element_size()
    field = (src.data_ptr(), stride, out.data_ptr(), row_bytes, fill.data_ptr(), 0)
    launch("gather_rows", [field], src.shape[0], rows)
    return out


def rows_of(tensor: Tensor) -> Tensor:
    """``tensor`` with its rows contiguous, any stride apart: itself where they are."""
    if tensor.is_contiguous() or (len(tensor) and tensor[0].is_contiguous()):
        return tensor
    return tensor.contiguous()


def launch(function: str, fields: list[Field], num_src: int, rows: Tensor) -> None:
    """Gather ``rows`` (contiguous) of every field on the device of ``rows``."""
    if rows.is_cuda:
        with torch.cuda.device(rows.device):
            stream = torch.cuda.current_stream().cuda_stream
            C.gather_rows_cuda(fields, rows.data_ptr(), rows.shape[0], stream)
    else:
        bad = C.gather_rows_cpu(fields, num_src, rows.data_ptr(), rows.shape[0], threads())
        if bad >= 0:
            raise out_of_range(function, rows, bad, num_src)


def refuse_invert(rows: Tensor, num_src: int) -> str | None:
    return refuse_device(rows, "invert_rows")


def invert_rows(rows: Tensor, num_src: int) -> tuple[Tensor, Tensor]:
    rows = rows.contiguous()
    starts, order = rows.new_empty(num_src + 1), torch.empty_like(rows)
    bad = C.invert_rows_cpu(
        rows.data_ptr(), rows.shape[0], num_src, starts.data_ptr(), order.data_ptr()
    )
    if bad >= 0:
        raise out_of_range("invert_rows", rows, bad, num_src)
    return starts, order
