from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from pyrl_ext.ops._triton import power_of_two, refuse_device

from .native import rows_of

TILE = 2048  # elements a program moves
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> str | None:
    if src.dtype.is_complex:
        return f"src is {src.dtype}, expected a real dtype"
    return refuse_device("src", src)


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> Tensor:
    src = rows_of(src)
    rows = rows.contiguous()
    out = src.new_empty(rows.shape[0], *src.shape[1:])
    word = WORDS[src.element_size()]
    launch([src], rows, [0 if fill is None else fill.contiguous().view(-1).view(word)], [out])
    return out


def launch(fields: list[Tensor], rows: Tensor, fills: list, outs: list[Tensor]) -> None:
    """Gather ``rows`` of every field; ``fills`` are all rows (tensors) or all numbers."""
    from .triton_kernel import gather_rows_kernel  # triton takes a while to import

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
