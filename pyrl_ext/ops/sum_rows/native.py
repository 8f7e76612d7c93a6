from math import prod
from typing import Any

from torch import Tensor

from pyrl_ext.ops._native import C, dtype_of, launch, refuses
from pyrl_ext.ops.gather_rows.native import rows_of

from . import new_output, wrong_entries

refuse = refuses("sum_rows")


def sum_rows(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor, isa: str = "auto") -> Tensor:
    src = rows_of(src)
    starts = starts.contiguous()
    order = order.contiguous()
    out = new_output(src, rows, starts, order)
    args = arguments(src, starts, order, out)
    bad = launch("sum_rows", src.device, isa, args=args)
    if bad is not None and bad >= 0:
        raise wrong_entries(bad, starts, order, len(src))
    return out


def arguments(src: Tensor, starts: Tensor, order: Tensor, out: Tensor) -> Any:
    """``C.SumRowsArgs``; every tensor but ``src`` is contiguous."""
    return C.SumRowsArgs(
        src=src.data_ptr(),
        dtype=dtype_of(src),
        num_in=src.shape[0],
        columns=prod(src.shape[1:]),
        stride=src.stride(0) * src.element_size(),
        starts=starts.data_ptr(),
        order=order.data_ptr(),
        num_out=out.shape[0],
        out=out.data_ptr(),
    )
