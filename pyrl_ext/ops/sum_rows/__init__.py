"""sum_rows: rows that were gathered go back to where they came from and add up.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch). Every one adds in ascending
order, so that the result is the same in every run; no atomics.
Gradient: gather_rows, whose gradient is sum_rows; of any order.
"""

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import FLOATS, INT64, Arguments
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.gather_rows import Inverse
from pyrl_ext.ops.gather_rows import op as gather
from pyrl_ext.ops.tensors import accum_dtype, on_gpu

_ARGUMENTS = Arguments("sum_rows", src=("M, ...", FLOATS), rows=("M", INT64))


def new_output(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    """An empty result."""
    return src.new_empty(starts.shape[0] - 1, *src.shape[1:])


def reference(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    """Add the first row of every sum, then the second, and so on. Syncs on cuda (how many)."""
    if not on_gpu(src) and (bad := _wrong(starts, order, len(src)).nonzero()).numel():
        raise wrong_entries(int(bad[0]), starts, order, len(src))
    wide = accum_dtype(src.dtype)
    out = src.new_zeros((len(starts) - 1, *src.shape[1:]), dtype=wide)
    counts = starts.diff()
    for j in range(int(counts.max()) if len(counts) else 0):
        n = (counts > j).nonzero().squeeze(1)
        out[n] += src[order[starts[n] + j]].to(wide)
    return out.to(src.dtype)


def _wrong(starts: Tensor, order: Tensor, num_rows: int) -> Tensor:
    """[N] bool: sums whose entries are not within ``order``, or not rows."""
    begin = starts[:-1]
    end = starts[1:]
    outside = ((order < 0) | (order >= num_rows)).cumsum(0)
    before = torch.cat([outside.new_zeros(1), outside])
    first, last = (place.clamp(0, len(order)) for place in (begin, end))
    inside = (begin >= 0) & (begin <= end) & (end <= len(order))
    return ~inside | (before[last] > before[first])


def wrong_entries(bad: int, starts: Tensor, order: Tensor, num_rows: int) -> IndexError:
    """The error of a sum whose entries are not rows."""
    at = int(starts[bad])
    end = int(starts[bad + 1])
    return IndexError(
        f"sum_rows: inverse.starts[{bad} : {bad + 2}] is [{at}, {end}] with entries "
        f"{order[at:end].tolist()[:8]}, expected rows of src in [0, {num_rows}), as "
        "invert_rows(rows, N) gives"
    )


op = Op("sum_rows(Tensor src, Tensor rows, Tensor starts, Tensor order) -> Tensor", fake=new_output)
op.serve(__name__, "native", "triton")
op.backend("reference", reference)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _src, *saved = inputs
    ctx.save_for_backward(*saved)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, starts, order = ctx.saved_tensors
    return gather(grad, rows, None, starts, order), None, None, None


op.gradient(_backward, _save)


def sum_rows(src: Tensor, rows: Tensor, inverse: Inverse) -> Tensor:
    """``out[n] = sum of src[m] over the m with rows[m] == n``, 0 where there is none.

    Added in ascending m in fp32 (fp64 in fp64), rounded once.

    Args:
        src:  [M, ...] float32, bfloat16, float16 or float64. Rows may lie any stride apart; a
            tensor strided within its rows is copied first.
        rows: [M] int64, entries in [-1, N); -1 goes nowhere.
        inverse: ``invert_rows(rows, N)``, which says N.

    Returns:
        [N, ...] dtype and device of ``src``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
        IndexError: the inverse names rows that ``src`` does not have (on CPU; on a GPU it is not
            checked, since that would wait for the device).
    """
    _ARGUMENTS.check(src, rows)
    inverse.check("sum_rows", rows)
    return op(src, rows, *inverse)
