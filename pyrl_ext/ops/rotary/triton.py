# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._packages import power_of_two

from . import new_outputs
from .native import heads_of


def rotary(
    query: Tensor, key: Tensor, turns: Tensor, last: bool, source: str, result: str, back: bool
) -> tuple[Tensor, Tensor]:
    query = heads_of(query)
    key = heads_of(key)
    outputs = new_outputs(query, key)
    sizes = *query.shape[1:], *key.shape[1:], turns.shape[1]
    if not len(turns):
        return outputs
    kernel: Any = rotary_kernel
    kernel[(len(turns),)](
        query,
        query.stride(0),
        query.stride(1),
        key,
        key.stride(0),
        key.stride(1),
        turns.contiguous(),
        *outputs,
        *sizes,
        LAST=last,
        FROM=source == "neighbours",
        TO=result == "neighbours",
        BACK=back,
        **tiles(*sizes),
    )
    return outputs


@triton.jit
def _turn(
    src,
    row,
    head,
    out,
    cos,
    sin,
    t,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    LAST: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    TALL: tl.constexpr,
    HALF: tl.constexpr,
    PLAIN: tl.constexpr,
):
    half: tl.constexpr = TURNED // 2
    plain: tl.constexpr = WIDTH - TURNED
    at: tl.constexpr = plain if LAST else 0  # type: ignore[assignment]
    rest: tl.constexpr = 0 if LAST else TURNED  # type: ignore[assignment]
    j = tl.arange(0, HALF)[None, :]
    for first in range(0, HEADS, TALL):
        h = first + tl.arange(0, TALL)[:, None]
        inside = (h < HEADS) & (j < half)
        source = src + t * row + h.to(tl.int64) * head
        result = out + (t * HEADS + h) * WIDTH
        a_at = 2 * j if FROM else j
        b_at = 2 * j + 1 if FROM else j + half
        a = tl.load(source + at + a_at, inside, other=0).to(cos.dtype)
        b = tl.load(source + at + b_at, inside, other=0).to(cos.dtype)
        x = (a * cos - b * sin).to(out.dtype.element_ty)
        y = (b * cos + a * sin).to(out.dtype.element_ty)
        tl.store(result + at + (2 * j if TO else j), x, inside)
        tl.store(result + at + (2 * j + 1 if TO else j + half), y, inside)
        if plain > 0:
            i = tl.arange(0, PLAIN)[None, :]
            there = (h < HEADS) & (i < plain)
            tl.store(result + rest + i, tl.load(source + rest + i, there, other=0), there)


@triton.jit
def rotary_kernel(
    query,  # [T, QUERIES, Q] read
    query_row,
    query_head,
    key,  # [T, KEYS, K] read
    key_row,
    key_head,
    turns,  # [T, TURNED] cosines, then sines
    query_out,  # contiguous, written
    key_out,
    QUERIES: tl.constexpr,
    Q: tl.constexpr,
    KEYS: tl.constexpr,
    K: tl.constexpr,
    TURNED: tl.constexpr,
    LAST: tl.constexpr,
    FROM: tl.constexpr,  # pairs are neighbours in what is read,
    TO: tl.constexpr,  # in what is written
    BACK: tl.constexpr,
    TALL: tl.constexpr,  # heads of a tile
    HALF: tl.constexpr,  # powers of two: from TURNED / 2 up,
    QP: tl.constexpr,  # from Q - TURNED up,
    KP: tl.constexpr,  # from K - TURNED up
):
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = TURNED // 2
    cos = tl.load(turns + t * TURNED + j, j < half, other=0)
    sin = tl.load(turns + t * TURNED + half + j, j < half, other=0)
    if BACK:
        sin = -sin
    _turn(
        query,
        query_row,
        query_head,
        query_out,
        cos,
        sin,
        t,
        QUERIES,
        Q,
        TURNED,
        LAST,
        FROM,
        TO,
        TALL,
        HALF,
        QP,
    )
    _turn(
        key,
        key_row,
        key_head,
        key_out,
        cos,
        sin,
        t,
        KEYS,
        K,
        TURNED,
        LAST,
        FROM,
        TO,
        TALL,
        HALF,
        KP,
    )


def tiles(queries: int, q: int, keys: int, k: int, turned: int) -> dict[str, int]:
    """Sizes of tiles: powers of two."""

    tall = max(1, min(power_of_two(queries), 2048 // power_of_two(max(q, k))))
    return {
        "TALL": tall,
        "HALF": power_of_two(turned // 2),
        "QP": power_of_two(q - turned),
        "KP": power_of_two(k - turned),
    }
