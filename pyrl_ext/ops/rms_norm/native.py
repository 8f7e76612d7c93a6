from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, address, dtype_of, launch, refuse_device
from pyrl_ext.ops._op import refuse_dtype
from pyrl_ext.ops.tensors import on_gpu

from . import new_grads, new_outputs

DTYPES = (torch.float32, torch.bfloat16)


def refuse(x: Tensor, *_: Any) -> str | None:
    reason = refuse_dtype("x", x, *DTYPES)
    return reason or (None if on_gpu(x) else refuse_device(x, "rms_norm"))


def rms_norm(x: Tensor, weight: Tensor, eps: float, isa: str = "auto") -> tuple[Tensor, Tensor]:
    if on_gpu(x):
        out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        return out, scale.view(x.shape[:-1])
    rows = rows_of(x)
    weight = weight.contiguous()
    out, scale = new_outputs(x)
    _run(rows, isa, eps, weight=weight, scale=scale, out=out)
    return out, scale


def rms_norm_grad(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    residual_grad: Tensor | None,
    isa: str = "auto",
) -> tuple[Tensor, Tensor]:
    if on_gpu(x):
        out, weight_grad = torch.ops.aten._fused_rms_norm_backward(
            grad, x, weight.shape, scale[..., None], weight, [True, True]
        )
        return out if residual_grad is None else out.add_(residual_grad), weight_grad
    out, weight_grad = new_grads(grad, x, weight)
    if not out.numel():
        return out, weight_grad.zero_()
    given = {"weight": weight, "scale": scale, "grad": grad, "residual_grad": residual_grad}
    dense = {name: None if each is None else each.contiguous() for name, each in given.items()}
    size = C.rms_norm_scratch(scale.numel(), weight.numel())
    parts = weight.new_empty(size, dtype=torch.float32)
    _run(rows_of(x), isa, 0.0, **dense, out=out, weight_grad=weight_grad, parts=parts)
    return out, weight_grad


class Rows(NamedTuple):
    """Rows in memory: row n begins ``n // heads * row + n % heads * head`` elements after ``data``.

    Args:
        data: a tensor that begins with the first row.
        rows, heads: rows in all, and those that lie ``head`` apart.
        row, head: strides [elements].
    """

    data: Tensor
    rows: int
    heads: int
    row: int
    head: int


def rows_of(x: Tensor) -> Rows:
    """The rows [..., W] of ``x`` where they are; a contiguous copy's where it takes more than two
    strides to find them."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    dims: list[tuple[int, int]] = []  # size and stride, innermost first
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0] * size, dims[-1][1]
        elif size != 1:
            dims.append((size, stride))
    if len(dims) > 2:
        return rows_of(x.contiguous())
    (heads, head), (rows, row) = [(1, 0)] * (len(dims) < 2) + dims + [(1, 0)] * (not dims)
    return Rows(x, rows * heads, heads, row, head)


def _run(rows: Rows, isa: str, eps: float, /, **tensors: Tensor | None) -> None:
    names = ("weight", "scale", "grad", "residual_grad", "out", "weight_grad", "parts")
    args = C.RmsNormArgs(
        src=rows.data.data_ptr(),
        dtype=dtype_of(rows.data),
        rows=rows.rows,
        heads=rows.heads,
        row=rows.row,
        head=rows.head,
        width=rows.data.shape[-1],
        eps=eps,
        **{name: address(tensors.get(name)) for name in names},
    )
    launch("rms_norm", rows.data.device, isa, args=args)
