import torch
from torch import Tensor

from pyrl_ext.ops._native import refuse_device
from pyrl_ext.ops.gather_rows.native import launch, rows_of

from .flat import pattern, plan


def refuse(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> str | None:
    return refuse_device(rows, "gather_rows")


def gather_fields(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> Tensor:
    rows = rows.contiguous()
    fields = [rows_of(field) for field in fields]  # copies live until the launch
    starts, row_bytes = plan(fields, rows.shape[0])
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=rows.device, pin_memory=pin)
    base = flat.data_ptr()
    table = [
        (
            f.data_ptr(),
            f.stride(0) * f.element_size(),
            base + start,
            each,
            0,
            pattern(f.dtype, fill),
        )
        for f, start, each, fill in zip(fields, starts, row_bytes, fills)
    ]
    launch("gather_fields", table, fields[0].shape[0], rows)
    return flat
