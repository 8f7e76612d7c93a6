"""rotary: queries and keys turned by their rows' angles, in one pass.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch). Gradient: the transposed
rotation, which is rotary with ``back``; of any order.
"""

from typing import Literal

import torch
from torch import Tensor

from pyrl_ext.ops._op import Op

from . import native, reference, triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Place = Literal["halves", "neighbours"]


def _fake(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


op = Op(
    "rotary(Tensor query, Tensor key, Tensor turns, bool last, str source, str result, bool back) "
    "-> (Tensor, Tensor)",
    fake=_fake,
)
op.serve(native, triton, reference)


def _save(ctx, inputs, output):
    _query, _key, turns, *ctx.how = inputs
    ctx.save_for_backward(turns)


def _backward(ctx, query_grad, key_grad):
    last, source, result, back = ctx.how
    (turns,) = ctx.saved_tensors
    grads = op(query_grad, key_grad, turns, last, result, source, not back)
    return *grads, None, None, None, None, None


op.gradient(_backward, _save)


def rotary(
    query: Tensor,
    key: Tensor,
    turns: Tensor,
    *,
    last: bool = False,
    source: Place = "halves",
    result: Place = "halves",
) -> tuple[Tensor, Tensor]:
    """Each pair (a, b) of a head's turned elements becomes (a cos - b sin, b cos + a sin).

    Computed in the dtype of ``turns`` and rounded once. Elements of a head beyond the turned ones
    are copied.

    Args:
        query:  [T, heads, D] float32, bfloat16, float16 or float64. Rows and heads may lie any
            stride apart.
        key:    [T, heads', D'], dtype and device of ``query``.
        turns:  [T, R] float32 (float64 with float64), row by row the cosines of the R / 2 angles,
            then their sines. A factor of both scales what is turned.
        last:   the last R elements of a head turn; otherwise the first.
        source: where pairs lie: "halves", elements j and j + R / 2 of the turned ones, or
            "neighbours", 2j and 2j + 1.
        result: where they lie in the result.

    Returns:
        [T, heads, D] and [T, heads', D'], contiguous.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or places do not fit.
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, turns {list(turns.shape)}"
    if query.ndim != 3 or key.ndim != 3 or turns.ndim != 2 or turns.shape[1] % 2:
        raise ValueError(f"rotary: {shapes}, expected [T, heads, D] twice and [T, R], R even")
    if not query.shape[0] == key.shape[0] == turns.shape[0]:
        raise ValueError(f"rotary: {shapes}, expected as many rows in all")
    if turns.shape[1] > min(query.shape[2], key.shape[2]):
        raise ValueError(f"rotary: {shapes}, expected R up to the width of heads")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if query.dtype not in DTYPES or key.dtype != query.dtype or turns.dtype != wide:
        raise TypeError(
            f"rotary: query is {query.dtype}, key {key.dtype}, turns {turns.dtype}, expected one "
            f"of {list(DTYPES)} twice, and turns float32, or float64 with float64"
        )
    if not query.device == key.device == turns.device:
        raise ValueError(
            f"rotary: query is on {query.device}, key on {key.device}, turns on {turns.device}, "
            "expected one device"
        )
    if not {source, result} <= {"halves", "neighbours"}:
        raise ValueError(
            f"rotary: source is {source!r}, result {result!r}, expected 'halves' or 'neighbours'"
        )
    return op(query, key, turns, last, source, result, False)
