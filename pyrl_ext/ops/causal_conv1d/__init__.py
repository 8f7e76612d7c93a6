"""causal_conv1d: each channel's convolution over the rows before it in its sequence, then SiLU.

Backends: causal_conv1d (the package's CUDA kernels, bfloat16), reference (torch). Everything is
computed in float32 (float64 for float64) and rounded once. Gradient: to ``x``, ``weight`` and
``bias``; it computes the sums before SiLU again, so only the arguments are kept. There is no second
derivative.
"""

from typing import Any

from torch import Tensor

from pyrl_ext.ops._arguments import WIDE_RANGE, Arguments, Like
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.sequences import check_sequences

from . import causal, reference

WIDTHS = (2, 3, 4)
_ARGUMENTS = Arguments(
    "causal_conv1d", x=("T, D", WIDE_RANGE), weight=("D, W", Like("x")), bias=("D", Like("x"))
)


def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _grad_fake(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))


op = Op(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens) -> Tensor", fake=_fake
)
op.backend("causal_conv1d", causal.causal_conv1d, refuse=causal.refuse)
op.backend("reference", reference.causal_conv1d)

grad_op = Op(
    "causal_conv1d_grad(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_grad_fake,
)
grad_op.backend("causal_conv1d", causal.causal_conv1d_grad, refuse=causal.refuse_grad)
grad_op.backend("reference", reference.causal_conv1d_grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, cu_seqlens = ctx.saved_tensors
    of_x, of_weight, of_bias = grad_op(grad, x, weight, bias, cu_seqlens)
    return of_x, of_weight, None if bias is None else of_bias, None


op.gradient(_backward)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """``out[t, d] = silu(bias[d] + sum over s < W of weight[d, W - 1 - s] * x[t - s, d])``.

    Rows of other sequences count as zeros.

    Args:
        x:          [T, D] float32, bfloat16 or float64, rows of packed sequences.
        weight:     [D, W] dtype of ``x``, W 2 to 4; the last one meets the row itself.
        bias:       [D] dtype of ``x``, or None: 0.
        cu_seqlens: [S + 1] int32, boundaries of sequences (`pyrl_ext.ops.sequences`).

    Returns:
        [T, D] dtype of ``x``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on a CPU, too, boundaries that
            do not ascend from 0 to at most T.
    """
    _ARGUMENTS.check(x, weight, bias)
    if weight.shape[1] not in WIDTHS:
        raise ValueError(
            f"causal_conv1d: weight is {list(weight.shape)}, expected one of {list(WIDTHS)} "
            "weights a channel"
        )
    check_sequences("causal_conv1d", x, cu_seqlens)
    return op(x, weight, bias, cu_seqlens)
