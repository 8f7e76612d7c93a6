"""gather_rows: the one data movement behind padding, packing, CP sharding and their inverses.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch).
Gradient: to ``src`` through the inverse map (rows gathered more than once add up, always in the
same order) and to ``fill``; of any order.
"""

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import ANY, INT64, Arguments, Like
from pyrl_ext.ops._op import Op

from .inverse import Inverse, check_range, invert_rows

_ARGUMENTS = Arguments(
    "gather_rows", src=("N, ...", ANY), rows=("M", INT64), fill=("...", Like("src"))
)


def new_output(
    src: Tensor,
    rows: Tensor,
    fill: Tensor | None,
    starts: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """An empty result."""
    return src.new_empty(rows.shape[0], *src.shape[1:])


def reference(src: Tensor, rows: Tensor, fill: Tensor | None, *inverse: Tensor | None) -> Tensor:
    """Append ``fill`` to ``src`` as a last row, and index. Syncs on cuda (the range check)."""
    check_range("gather_rows", rows, src.shape[0])
    fill = src.new_zeros(src.shape[1:]) if fill is None else fill
    return torch.cat([src, fill[None]])[rows]  # -1 is the last row


op = Op(
    "gather_rows(Tensor src, Tensor rows, Tensor? fill, Tensor? starts=None, Tensor? order=None)"
    " -> Tensor",
    fake=new_output,
)
op.serve(__name__, "native", "triton")
op.backend("reference", reference)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    src, rows, _fill, starts, order = inputs
    ctx.save_for_backward(rows, starts, order)
    ctx.num_src = src.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, starts, order = ctx.saved_tensors
    grad_src = grad_fill = None
    if ctx.needs_input_grad[0]:
        if starts is None:
            starts, order = invert_rows(rows, ctx.num_src)
        # by name: sum_rows, whose gradient is gather_rows, imports this module
        grad_src = torch.ops.pyrl_ext.sum_rows(grad, rows, starts, order)
    if ctx.needs_input_grad[2]:
        there = (rows >= 0).view(-1, *[1] * (grad.ndim - 1))
        grad_fill = grad.masked_fill(there, 0).sum(0)
    return grad_src, None, grad_fill, None, None


op.gradient(_backward, _save)


def gather_rows(
    src: Tensor, rows: Tensor, fill: Tensor | None = None, inverse: Inverse | None = None
) -> Tensor:
    """``out[i] = src[rows[i]]``, or ``fill`` where ``rows[i]`` is -1.

    Args:
        src:  [N, ...] any dtype, a row is everything behind the first dimension. Rows may lie any
            stride apart (``routes[:, a:b]``); a tensor strided within its rows is copied first.
        rows: [M] int64, entries in [-1, N). Repeated entries are allowed.
        fill: [...] the shape of one row, dtype and device of ``src``; None: zeros.
        inverse: ``invert_rows(rows, N)``, which the gradient of ``src`` needs. None: the backward
            makes it, in every call.

    Returns:
        [M, ...] dtype and device of ``src``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
        IndexError: an entry of ``rows`` is out of range (on CPU). On a GPU the native and Triton
            kernels do not check, since that would wait for the device; there, rows come from
            :class:`~pyrl_ext.pack.layout.TokenLayout`, which knows the range.
    """
    _ARGUMENTS.check(src, rows, fill)
    if inverse is None:
        return op(src, rows, fill)
    inverse.check("gather_rows", rows, src.shape[0])
    return op(src, rows, fill, *inverse)
