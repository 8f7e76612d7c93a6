"""gated_delta_rule: the recurrence of a gated delta net layer over packed sequences.

Backends: fla (the package's Triton kernels, bfloat16, with states and products between chunks
rounded to it), reference (torch, in chunks). The reference computes everything in float32 (float64
for float64) and rounds once. Gradient: to every argument but ``cu_seqlens``; states are computed
again, so only the arguments are kept. There is no second derivative.
"""

from typing import Any

from torch import Tensor

from pyrl_ext.ops._arguments import WIDE_RANGE, Arguments, Like
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.sequences import check_sequences

_CHECKED = Arguments(
    "gated_delta_rule",
    q=("T, H, K", WIDE_RANGE),
    k=("T, H, K", Like("q")),
    v=("T, H, V", Like("q")),
    g=("T, H", Like("q", wide=True)),
    beta=("T, H", Like("q")),
)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return v.new_empty(v.shape)


def _grad_fake(grad: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in arguments[:-1])


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens"
op = Op(f"gated_delta_rule({_ARGUMENTS}) -> Tensor", fake=_fake)
op.serve(__name__, "fla", "reference")

grad_op = Op(
    f"gated_delta_rule_grad(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_grad_fake,
)
grad_op.serve(__name__, "fla", "reference")


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *grad_op(grad, *ctx.saved_tensors), None


op.gradient(_backward)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """``S = e S + beta[t] k[t] (v[t] - e S^T k[t])^T, out[t] = S^T q[t] / sqrt(K)``, e = exp(g[t]).

    A head at a time; S, [K, V], is zero where a sequence begins.

    Args:
        q, k:       [T, H, K] float32, bfloat16 or float64, rows of packed sequences, length 1.
        v:          [T, H, V] dtype of ``q``.
        g:          [T, H] float32 (float64 for float64), log decay, at most 0.
        beta:       [T, H] dtype of ``q``, 0 to 1.
        cu_seqlens: [S + 1] int32, boundaries of sequences (`pyrl_ext.ops.sequences`).

    Returns:
        [T, H, V] dtype of ``q``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on a CPU, too, boundaries that
            do not ascend from 0 to at most T.
    """
    _CHECKED.check(q, k, v, g, beta)
    check_sequences("gated_delta_rule", q, cu_seqlens)
    return op(q, k, v, g, beta, cu_seqlens)
