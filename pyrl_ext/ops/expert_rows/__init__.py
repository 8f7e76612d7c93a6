"""expert_rows: the tokens of each expert, experts one after the other, and the weight of each row.

Backends: native (C++ threads on CPU; CUDA, two launches), triton (the same two), reference (torch,
13 operators). The order is fixed: every backend has the same bits in every run; no atomics.
Gradient: to ``probs``, one kernel; of any order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import ANY, FLOATS, INT64, Arguments
from pyrl_ext.ops._op import Op
from pyrl_ext.ops.gather_rows import Inverse

from .reference import new_outputs

_ARGUMENTS = Arguments("expert_rows", routing_map=("T, E", (torch.bool,)), probs=("T, E", FLOATS))
_GRAD_ARGUMENTS = Arguments(
    "expert_rows_grad", grad=("T * K", ANY), order=("T * K", INT64), places=("T * K", INT64)
)


class ExpertRows(NamedTuple):
    """The rows of T tokens with K experts each.

    Args:
        weights: [T * K] the probability of each row, dtype of ``probs``.
        rows: [T * K] int64, the token of each row.
        inverse: of ``rows``.
        places: [T * K] int64, of each row its place in the flattened routing map.
        counts: [E] int32, rows of each expert.
    """

    weights: Tensor
    rows: Tensor
    inverse: Inverse
    places: Tensor
    counts: Tensor


def _fake(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, ...]:
    return new_outputs(probs, top_k)


def _grad_fake(grad: Tensor, order: Tensor, places: Tensor, tokens: int, experts: int) -> Tensor:
    return grad.new_empty(tokens, experts)


op = Op(
    "expert_rows(Tensor routing_map, Tensor probs, SymInt top_k)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
)
op.serve(__name__, "native", "triton", "reference")

grad_op = Op(
    "expert_rows_grad(Tensor grad, Tensor order, Tensor places, SymInt tokens, SymInt experts)"
    " -> Tensor",
    fake=_grad_fake,
)
grad_op.serve(__name__, "native", "triton", "reference")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)  # none of zeros for the integers
    _weights, _rows, _starts, order, places, _counts = output
    ctx.save_for_backward(order, places)
    ctx.shape = inputs[0].shape


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad = grads[0]
    return (
        None,
        None if grad is None else expert_rows_grad(grad, *ctx.saved_tensors, *ctx.shape),
        None,
    )


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[2])


def _backward_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (places,) = ctx.saved_tensors
    return grad.reshape(-1).gather(0, places), None, None, None, None  # the gradient is linear


op.gradient(_backward, _save)
grad_op.gradient(_backward_again, _save_again)


def expert_rows(routing_map: Tensor, probs: Tensor, top_k: int) -> ExpertRows:
    """``rows, places, weights[m] = t, t * E + e, probs[t, e]`` of the m-th (e, t) in the map.

    Args:
        routing_map: [T, E] bool, exactly ``top_k`` True in a row. The caller guarantees it: routers
            choose distinct experts, and a batch refuses samples whose routes repeat one.
        probs: [T, E] float32, bfloat16, float16 or float64.
        top_k: K.

    Returns:
        ExpertRows, on the device of ``probs``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on CPU also where a token has
            more or fewer experts than ``top_k``. On a GPU that is not checked, since that would
            wait for the device: with fewer, some of ``rows`` stay undefined, and gathering by them
            reads outside of the tokens. They are not set to 0 either: a fault of the device is
            better than numbers of another token.
    """
    _ARGUMENTS.check(routing_map, probs)
    if not 0 < top_k <= routing_map.shape[1]:
        raise ValueError(
            f"expert_rows: top_k is {top_k}, expected 1 to the {routing_map.shape[1]} experts"
        )
    weights, rows, starts, order, places, counts = op(routing_map, probs, top_k)
    return ExpertRows(weights, rows, Inverse(starts, order), places, counts)


def expert_rows_grad(
    grad: Tensor, order: Tensor, places: Tensor, tokens: int, experts: int
) -> Tensor:
    """The gradient of ``probs`` from that of the weights: ``out.flatten()[places] = grad``, else 0.

    Args:
        grad: [T * K]
        order, places: as `expert_rows` gives them.
        tokens, experts: T, E.

    Returns:
        [T, E] dtype of ``grad``.

    Raises: ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _GRAD_ARGUMENTS.check(grad, order, places)
    return grad_op(grad, order, places, tokens, experts)
