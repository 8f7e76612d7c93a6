"""sum_rows: rows that were gathered go back to where they came from and add up.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch). Every one adds in ascending
order, so that the result is the same in every run; no atomics.
Gradient: gather_rows, whose gradient is sum_rows; of any order.
"""

from torch import Tensor

from pyrl_ext.ops._arguments import FLOATS, INT64, Arguments
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.gather_rows import Inverse
from pyrl_ext.ops.gather_rows import op as gather

from . import native, reference, triton

_ARGUMENTS = Arguments("sum_rows", src=("M, ...", FLOATS), rows=("M", INT64))


def _fake(src: Tensor, rows: Tensor, starts: Tensor, order: Tensor) -> Tensor:
    return src.new_empty(starts.shape[0] - 1, *src.shape[1:])


op = Op("sum_rows(Tensor src, Tensor rows, Tensor starts, Tensor order) -> Tensor", fake=_fake)
op.serve(native, triton, reference)


def _save(ctx, inputs, output):
    _src, *saved = inputs
    ctx.save_for_backward(*saved)


def _backward(ctx, grad):
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
