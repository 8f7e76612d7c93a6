"""replay_probs: the probabilities a router gives to known experts, and the routing map.

Once the experts are known, megatron-core gathers their scores, normalizes, scales and casts them,
and fills two dense tensors. Here one kernel does all of it and writes every element once.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch, megatron-core's operations).
In float32 the native one has the bits of megatron-core's: it adds in the order of torch's kernels
of the same device.
Gradient: to ``scores``, from the gradient of the probabilities at ``ids``; one kernel,
deterministic. There is no second derivative.
"""

from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import FLOATS, Arguments
from pyrl_ext.ops._op import Op

ID_DTYPES = (torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64)
NORMS = ("none", "sum", "softmax")
_ARGUMENTS = Arguments("replay_probs", scores=("M, E", FLOATS), ids=("M, K", ID_DTYPES))


def new_outputs(
    scores: Tensor, ids: Tensor, norm: str, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Empty probabilities and routing map."""
    shape = scores.shape
    return scores.new_empty(shape, dtype=out_dtype), scores.new_empty(shape, dtype=torch.bool)


def _grad_fake(grad: Tensor, scores: Tensor, ids: Tensor, norm: str, scale: float) -> Tensor:
    return scores.new_empty(scores.shape)


op = Op(
    "replay_probs(Tensor scores, Tensor ids, str norm, float scale, ScalarType out_dtype)"
    " -> (Tensor, Tensor)",
    fake=new_outputs,
)
op.serve(__name__, "native", "triton", "reference")

grad_op = Op(
    "replay_probs_grad(Tensor grad, Tensor scores, Tensor ids, str norm, float scale) -> Tensor",
    fake=_grad_fake,
)
grad_op.serve(__name__, "native", "triton", "reference")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)  # none of zeros for the map
    scores, ids, ctx.norm, ctx.scale, _ = inputs
    ctx.save_for_backward(scores, ids)


def _backward(ctx: Any, grad_probs: Tensor | None, _grad_map: Any) -> tuple[Tensor | None, ...]:
    if grad_probs is None:
        return None, None, None, None, None
    return grad_op(grad_probs, *ctx.saved_tensors, ctx.norm, ctx.scale), None, None, None, None


op.gradient(_backward, _save)


def replay_probs(
    scores: Tensor,
    ids: Tensor,
    norm: str = "none",
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``probs[m, ids[m, j]] = scale * norm(scores[m, ids[m]])[j]``, else 0; and the routing map.

    With ``v`` the K scores of a token, in float32 (float64 for float64 scores)::

        "none"     v
        "sum"      v / (sum(v) + 1e-20), v if K is 1
        "softmax"  softmax(v)

    Args:
        scores: [M, E] float32, bfloat16, float16 or float64.
        ids:    [M, K] uint8, uint16, int16, int32 or int64, experts in [0, E). The K of a token are
            distinct: this is not checked, and what a duplicate gives is undefined.
        norm:   "none", "sum" or "softmax".
        scale:  factor of the probabilities; None or 0: none.
        out_dtype: of the probabilities, one of those of ``scores``, which None takes.

    Returns:
        probs [M, E] ``out_dtype``, routing_map [M, E] bool.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or ``norm`` do not fit.
        IndexError: an entry of ``ids`` is out of range (on CPU). On a GPU no kernel checks, since
            that would wait for the device, and the native and Triton ones read out of bounds.
    """
    _ARGUMENTS.check(scores, ids)
    out_dtype = scores.dtype if out_dtype is None else out_dtype
    if ids.shape[1] > scores.shape[1]:
        raise ValueError(
            f"replay_probs: {ids.shape[1]} ids a token, expected at most the {scores.shape[1]} "
            "experts; the experts of a token are distinct"
        )
    if out_dtype not in FLOATS:
        raise TypeError(f"replay_probs: out_dtype is {out_dtype}, expected one of {list(FLOATS)}")
    if norm not in NORMS:
        raise ValueError(f"replay_probs: norm is {norm!r}, expected one of {list(NORMS)}")
    return op(scores, ids, norm, scale or 0.0, out_dtype)
