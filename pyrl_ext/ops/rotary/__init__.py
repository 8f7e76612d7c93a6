"""rotary: queries and keys turned by their rows' angles, in one pass.

Backends: native (C++ threads on CPU, CUDA), triton, reference (torch). Gradient: the transposed
rotation, which is rotary with ``back``; of any order.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from pyrl_ext.ops._arguments import FLOATS, Arguments, Like, shapes
from pyrl_ext.ops._op import Op

_ARGUMENTS = Arguments(
    "rotary",
    query=("T, heads, D", FLOATS),
    key=("T, heads', D'", Like("query")),
    turns=("T, R", Like("query", wide=True)),
)
Place = Literal["halves", "neighbours"]


def new_outputs(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Empty results."""
    return query.new_empty(query.shape), key.new_empty(key.shape)


def reference(
    query: Tensor, key: Tensor, turns: Tensor, last: bool, source: str, result: str, back: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = turns[:, None].chunk(2, -1)

    def turned(heads: Tensor) -> Tensor:
        plain = heads.shape[-1] - turns.shape[1]
        first, second = heads.split([plain, turns.shape[1]][:: 1 if last else -1], -1)
        pairs = second if last else first
        a, b = _pairs(pairs, source).to(turns.dtype).unbind(-2 if source == "halves" else -1)
        s = -sin if back else sin
        both = torch.stack((a * cos - b * s, b * cos + a * s), -2 if result == "halves" else -1)
        out = both.flatten(-2).to(heads.dtype)
        return torch.cat((first, out) if last else (out, second), -1)

    return turned(query), turned(key)


def _pairs(x: Tensor, place: str) -> Tensor:
    return x.unflatten(-1, (2, -1) if place == "halves" else (-1, 2))


op = Op(
    "rotary(Tensor query, Tensor key, Tensor turns, bool last, str source, str result, bool back) "
    "-> (Tensor, Tensor)",
    fake=new_outputs,
)
op.serve(__name__, "native", "triton")
op.backend("reference", reference)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _query, _key, turns, *ctx.how = inputs
    ctx.save_for_backward(turns)


def _backward(ctx: Any, query_grad: Tensor, key_grad: Tensor) -> tuple[Tensor | None, ...]:
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
    _ARGUMENTS.check(query, key, turns)
    if turns.shape[1] % 2 or turns.shape[1] > min(query.shape[2], key.shape[2]):
        found = shapes(query=query, key=key, turns=turns)
        raise ValueError(f"rotary: {found}, expected R up to the width of heads, and even")
    if not {source, result} <= {"halves", "neighbours"}:
        raise ValueError(
            f"rotary: source is {source!r}, result {result!r}, expected 'halves' or 'neighbours'"
        )
    return op(query, key, turns, last, source, result, False)
