"""gather_rows: the one data movement behind padding, packing, CP sharding and their inverses.

Backends: triton and native (C++ threads on CPU, CUDA), reference (torch).
Gradient: to ``src`` (rows gathered more than once add up) and to ``fill``.
"""

import torch
from torch import Tensor

from pyrl_ext.ops._op import Op

from . import native, reference, triton


def _fake(src: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    return src.new_empty(rows.shape[0], src.shape[1])


op = Op("gather_rows(Tensor src, Tensor rows, Tensor fill) -> Tensor", fake=_fake)
op.backend("native", native.gather_rows, refuse=native.refuse)
op.backend("triton", triton.gather_rows, refuse=triton.refuse)
op.backend("reference", reference.gather_rows)


def _save(ctx, inputs, output):
    src, rows, _fill = inputs
    ctx.save_for_backward(rows)
    ctx.num_src = src.shape[0]


def _backward(ctx, grad):
    (rows,) = ctx.saved_tensors
    missing = (rows < 0)[:, None]
    grad_src = grad_fill = None
    if ctx.needs_input_grad[0]:
        grad_src = grad.new_zeros(ctx.num_src + 1, grad.shape[1])  # the last row takes the fill's
        grad_src = grad_src.index_add(0, rows.where(rows >= 0, ctx.num_src), grad)[:-1]
    if ctx.needs_input_grad[2]:
        grad_fill = grad.masked_fill(~missing, 0).sum(0)
    return grad_src, None, grad_fill


op.gradient(_backward, _save)


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    """``out[i] = src[rows[i]]``, or ``fill`` where ``rows[i]`` is -1.

    Args:
        src:  [N, ...] any dtype, a row is everything behind the first dimension.
        rows: [M] int64, entries in [-1, N). Repeated entries are allowed.
        fill: [...] the shape of one row, dtype and device of ``src``.

    Returns:
        [M, ...] dtype and device of ``src``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
        IndexError: an entry of ``rows`` is out of range (on CPU). On a GPU the native and Triton
            kernels do not check, since that would wait for the device; there, rows come from
            :class:`~pyrl_ext.layout.TokenLayout`, which knows the range.
    """
    if src.ndim < 1 or rows.ndim != 1 or fill.shape != src.shape[1:]:
        raise ValueError(
            f"gather_rows: src {list(src.shape)}, rows {list(rows.shape)}, fill "
            f"{list(fill.shape)}, expected [N, ...], [M], [...]"
        )
    if rows.dtype != torch.int64:
        raise TypeError(f"gather_rows: rows is {rows.dtype}, expected torch.int64")
    if fill.dtype != src.dtype:
        raise TypeError(f"gather_rows: fill is {fill.dtype}, expected src's {src.dtype}")
    if not src.device == rows.device == fill.device:
        raise ValueError(
            f"gather_rows: src is on {src.device}, rows on {rows.device}, fill on {fill.device}, "
            "expected one device"
        )
    width = fill.numel()
    out = op(src.reshape(src.shape[0], width), rows, fill.reshape(width))
    return out.reshape(rows.shape[0], *src.shape[1:])
