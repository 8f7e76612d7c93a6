"""The padding rule of packed sequences, for the plan and for `pack/layout.py`."""

from __future__ import annotations

import math

FP8_TILE_ROWS = 16
"""Tensor cores multiply 8-bit matrices in tiles of this many rows."""


def alignment(tp_size: int, cp_size: int, fp8: bool = False) -> int:
    """Rows of a packed sequence are padded to a multiple of this.

    Sequence parallelism gives each of `tp_size` ranks an equal part, the zigzag gives each of
    `cp_size` ranks (if more than one) two, and FP8 gives a context-parallel rank whole tiles.
    """
    unit = tp_size if cp_size == 1 else 2 * cp_size * tp_size
    return math.lcm(unit, FP8_TILE_ROWS * cp_size) if fp8 else unit
