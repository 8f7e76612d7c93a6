import torch
from torch import Tensor

from pyrl_ext.ops.gather_rows.native import rows_of
from pyrl_ext.ops.gather_rows.triton import launch

from . import flat_layout, pattern

FIELDS = 32  # of a launch


def gather_fields(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> Tensor:
    rows = rows.contiguous()
    starts, row_bytes = flat_layout(fields, rows.shape[0])
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=rows.device, pin_memory=pin)
    outs = []
    numbers = []
    for field, start, each, fill in zip(fields, starts, row_bytes, fills):
        out = flat[start : start + len(rows) * each].view(field.dtype)
        outs.append(out.view(len(rows), *field.shape[1:]))
        bits = 8 * field.element_size()
        number = pattern(field.dtype, fill) & (2**bits - 1)
        numbers.append(number - (number >> (bits - 1) << bits))
    for f in range(0, len(fields), FIELDS):
        part = slice(f, f + FIELDS)
        launch([rows_of(field) for field in fields[part]], rows, numbers[part], outs[part])
    return flat
