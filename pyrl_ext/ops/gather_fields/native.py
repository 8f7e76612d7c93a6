import torch
from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device
from pyrl_ext.ops.gather_rows.native import gather, rows_of

from . import flat_layout, pattern


def refuse(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> str | None:
    return refuse_device(rows, "gather_rows")


def gather_fields(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> Tensor:
    rows = rows.contiguous()
    fields = [rows_of(field) for field in fields]  # copies live until the launch
    starts, row_bytes = flat_layout(fields, rows.shape[0])
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=rows.device, pin_memory=pin)
    base = flat.data_ptr()
    table = [
        C.Field(
            src=field.data_ptr(),
            stride=field.stride(0) * field.element_size(),
            out=base + start,
            row_bytes=row_size,
            pattern=pattern(field.dtype, fill),
        )
        for field, start, row_size, fill in zip(fields, starts, row_bytes, fills)
    ]
    gather("gather_fields", table, fields[0].shape[0], rows)
    return flat
