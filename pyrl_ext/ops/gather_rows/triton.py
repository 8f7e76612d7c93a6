"""Every tensor comes as integers of its element's width, so a kernel serves all dtypes."""

# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._packages import power_of_two

from . import new_output
from .native import rows_of

TILE = 2048  # elements a program moves
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> str | None:
    return f"src is {src.dtype}, expected a real dtype" if src.dtype.is_complex else None


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> Tensor:
    src = rows_of(src)
    rows = rows.contiguous()
    out = new_output(src, rows, fill)
    word = WORDS[src.element_size()]
    launch([src], rows, [0 if fill is None else fill.contiguous().view(-1).view(word)], [out])
    return out


def launch(fields: list[Tensor], rows: Tensor, fills: list[Any], outs: list[Tensor]) -> None:
    """Gather ``rows`` of every field; ``fills`` are all rows (tensors) or all numbers."""
    widths = []
    tall = []
    wide = []
    firsts = [0]
    for out in outs:
        width = prod(out.shape[1:])
        columns = min(1024, power_of_two(width))
        widths.append(width)
        wide.append(columns)
        tall.append(TILE // columns)
        firsts.append(firsts[-1] + -(-len(rows) // tall[-1]) * -(-width // columns))
    if firsts[-1] == 0:
        return
    gather_rows_kernel[(firsts[-1],)](
        tuple(words(field) for field in fields),
        tuple(field.stride(0) for field in fields),
        rows,
        tuple(fills),
        tuple(words(out) for out in outs),
        tuple(firsts),
        len(rows),
        WIDTHS=tuple(widths),  # type: ignore[arg-type]
        TALL=tuple(tall),  # type: ignore[arg-type]
        WIDE=tuple(wide),  # type: ignore[arg-type]
        FILL_ROWS=isinstance(fills[0], Tensor),  # type: ignore[arg-type]
    )


def words(tensor: Tensor) -> Tensor:
    """The same memory as integers of the element's width."""
    return tensor.view(WORDS[tensor.element_size()])


@triton.jit(do_not_specialize=["M"])  # a bound
def gather_rows_kernel(
    srcs,  # each [N, WIDTHS] read, rows `strides` apart
    strides,
    rows,  # [M] int64, -1 or a row of the sources
    fills,  # FILL_ROWS: each [WIDTHS] read; else an element of each
    outs,  # each [M, WIDTHS] written
    firsts,  # of the programs, those that begin a field, and their number
    M,
    WIDTHS: tl.constexpr,
    TALL: tl.constexpr,  # rows of a tile
    WIDE: tl.constexpr,  # columns of a tile
    FILL_ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    for f in tl.static_range(len(WIDTHS)):  # type: ignore
        if program >= firsts[f] and program < firsts[f + 1]:
            across: tl.constexpr = (WIDTHS[f] + WIDE[f] - 1) // WIDE[f]
            tile = program - firsts[f]
            m = (tile // across).to(tl.int64) * TALL[f] + tl.arange(0, TALL[f])
            c = tile % across * WIDE[f] + tl.arange(0, WIDE[f])
            row = tl.load(rows + m, m < M, other=-1)[:, None]
            inside = (m < M)[:, None] & (c < WIDTHS[f])[None, :]
            value = tl.load(srcs[f] + row * strides[f] + c[None, :], inside & (row >= 0), other=0)
            if FILL_ROWS:
                padding = tl.load(fills[f] + c[None, :], inside & (row < 0), other=0)
            else:
                padding = tl.cast(fills[f], value.dtype)  # Triton makes a fill of 1 a constant
            tl.store(
                outs[f] + m[:, None] * WIDTHS[f] + c[None, :],
                tl.where(row >= 0, value, padding),
                inside,
            )
