import torch
from torch import Tensor

from pyrl_ext.ops.gather_rows.reference import check_range

from .flat import flat_layout, pattern


def gather_fields(fields: list[Tensor], rows: Tensor, fills: list[float], pin: bool) -> Tensor:
    """Index the bytes of every field, fill last. Syncs on cuda (the range check)."""
    check_range("gather_fields", rows, fields[0].shape[0])
    starts, row_bytes = flat_layout(fields, rows.shape[0])
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=rows.device, pin_memory=pin)
    for field, start, each, fill in zip(fields, starts, row_bytes, fills):
        data = field.clone(memory_format=torch.contiguous_format).view(-1)
        data = data.view(torch.uint8).view(len(field), each)
        element = torch.tensor([pattern(field.dtype, fill)], device=rows.device).view(torch.uint8)
        padding = element.repeat(-(-each // 8))[:each]
        gathered = torch.cat([data, padding[None]])[rows]  # -1 is the last row
        flat[start : start + gathered.numel()] = gathered.view(-1)
    return flat
