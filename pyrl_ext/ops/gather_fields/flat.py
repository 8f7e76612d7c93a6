"""How fields share one flat tensor, and the bytes of a padding element."""

import struct
from collections.abc import Sequence
from functools import lru_cache
from math import copysign, prod

import torch
from torch import Tensor

ALIGN = 256  # bytes, the alignment of a device's own allocations


def flat_layout(fields: Sequence[Tensor], num_out: int) -> tuple[list[int], list[int]]:
    """The byte offset of each field in the flat tensor, then its size; the row bytes of each."""
    starts = [0]
    row_bytes = []
    for field in fields:
        width = 1 if field.ndim == 1 else prod(field.shape[1:])
        row_bytes.append(field.element_size() * width)
        starts.append(starts[-1] + -(-num_out * row_bytes[-1] // ALIGN) * ALIGN)
    return starts, row_bytes


def pattern(dtype: torch.dtype, fill: float) -> int:
    """The bytes of ``fill`` in ``dtype``, repeated to 8, as a signed integer.

    Raises:
        ValueError: ``dtype`` does not hold ``fill``.
    """
    return _pattern(dtype, fill, copysign(1, fill))  # -0.0 and 0.0 are one key


@lru_cache(maxsize=256)
def _pattern(dtype: torch.dtype, fill: float, _sign: float) -> int:
    if not dtype.is_floating_point:
        top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
        lowest = 0 if dtype == torch.bool else torch.iinfo(dtype).min
        # a double holds whole numbers below 2^53
        if not (fill == fill // 1 and lowest <= fill <= top and abs(fill) < 2**53):
            raise ValueError(
                f"gather_fields: a fill is {fill}, expected a number that {dtype} holds"
            )
        fill = int(fill)
    element = torch.tensor([fill], dtype=dtype).view(torch.uint8).tolist()
    return struct.unpack("<q", bytes(element * (8 // len(element))))[0]
