"""The padding rule of packed sequences, for the plan and for `pack/layout.py`."""

from __future__ import annotations

import math

# recipe of products in 8 bits -> rows of a matrix come in multiples of this
TILE_ROWS = {None: 1, "blockwise": 8, "tensorwise": 8, "mxfp8": 32}


def alignment(tp_size: int, cp_size: int, tile_rows: int = 1) -> int:
    """Rows of a packed sequence are padded to a multiple of this.

    Sequence parallelism gives each of `tp_size` ranks an equal part, and the zigzag gives each of
    `cp_size` ranks (if more than one) two. The part of each of all of them is a multiple of
    `tile_rows`.
    """
    unit = tp_size if cp_size == 1 else 2 * cp_size * tp_size
    return math.lcm(unit, tile_rows * tp_size * cp_size)


def padded(rows: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``rows``."""
    return -(-rows // unit) * unit
