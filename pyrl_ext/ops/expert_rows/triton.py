# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._packages import power_of_two

from .reference import new_outputs

MAX_EXPERTS = 1024


def refuse(routing_map: Tensor, probs: Tensor, top_k: int) -> str | None:
    tokens, experts = routing_map.shape
    if experts > MAX_EXPERTS or tokens * top_k >= 2**31:
        return (
            f"{tokens} tokens, {top_k} of {experts} experts, expected at most {MAX_EXPERTS} "
            "experts and 2**31 rows"
        )
    return None


def refuse_expert_rows_grad(*_: Any) -> None:
    """Takes every call."""


def expert_rows(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, ...]:
    routing_map = routing_map.contiguous()
    probs = probs.contiguous()
    tokens, experts = probs.shape
    out = new_outputs(probs, top_k)
    sizes = tiles(experts)
    number = max(1, -(-tokens // 256))
    per_tile = probs.new_empty(number, experts, dtype=torch.int32)
    count: Any = expert_rows_count_kernel
    count[(number,)](routing_map, per_tile, tokens, experts, **sizes)
    place: Any = expert_rows_kernel
    place[(number,)](
        routing_map,
        probs,
        per_tile,
        *out,
        tokens,
        experts,
        top_k,
        number,
        CHUNK=1024 // sizes["WIDTH"],
        **sizes,
    )
    return out


def expert_rows_grad(
    grad: Tensor, order: Tensor, places: Tensor, tokens: int, experts: int
) -> Tensor:
    out = grad.new_empty(tokens, experts)
    if tokens:
        sizes = tiles(experts)
        kernel: Any = expert_rows_grad_kernel
        kernel[(-(-tokens // sizes["TALL"]),)](
            grad.contiguous(),
            order,
            places,
            out,
            tokens,
            experts,
            K=len(order) // tokens,
            TALL=sizes["TALL"],
            WIDTH=sizes["WIDTH"],
        )
    return out


@triton.jit(do_not_specialize=["T"])  # a bound
def expert_rows_count_kernel(
    routing_map,  # [T, E] bool
    counts,  # [tiles, E] int32 written: rows of each expert in TALL * STEPS tokens
    T,
    E,
    TALL: tl.constexpr,  # tokens at once
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two from E up
):
    tile = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for step in range(STEPS):
        t = (tile * STEPS + step) * TALL + tl.arange(0, TALL)[:, None]
        inside = (t < T) & (e < E)[None, :]
        total += tl.sum(tl.load(routing_map + t * E + e[None, :], inside, other=0).to(tl.int32), 0)
    tl.store(counts + tile * E + e, total, e < E)


@triton.jit(do_not_specialize=["T", "TILES"])
def expert_rows_kernel(
    routing_map,  # [T, E] bool, K of a row
    probs,  # [T, E]
    tile_counts,  # [TILES, E] int32
    weights,  # [T * K] written, as all below
    rows,  # [T * K] int64
    starts,  # [T + 1] int64
    order,  # [T * K] int64
    places,  # [T * K] int64
    counts,  # [E] int32
    T,
    E,
    K,
    TILES,
    TALL: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,  # tiles that are added at once
):
    tile = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    before = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, TILES, CHUNK):
        i = first + tl.arange(0, CHUNK)[:, None]
        inside = (i < TILES) & (e < E)[None, :]
        own = tl.load(tile_counts + i.to(tl.int64) * E + e[None, :], inside, other=0)
        total += tl.sum(own, 0)
        before += tl.sum(tl.where(i < tile, own, 0), 0)
    if tile == 0:
        tl.store(counts + e, total, e < E)
        tl.store(starts + T, (T * K).to(tl.int64))
    row = tl.cumsum(total, 0) - total + before
    for step in range(STEPS):
        t = (tile * STEPS + step) * TALL + tl.arange(0, TALL)[:, None]
        at = t * E + e[None, :]
        here = tl.load(routing_map + at, (t < T) & (e < E)[None, :], other=0).to(tl.int32)
        m = (row[None, :] + tl.cumsum(here, 0) - here).to(tl.int64)
        slot = tl.cumsum(here, 1) - here
        row += tl.sum(here, 0)
        chosen = (here != 0) & (slot < K) & (m < T * K)
        tl.store(rows + m, tl.broadcast_to(t, at.shape), chosen)
        tl.store(places + m, at, chosen)
        tl.store(weights + m, tl.load(probs + at, chosen, other=0), chosen)
        tl.store(order + t * K + slot, m, chosen)
        tl.store(starts + t, t * K, t < T)


@triton.jit(do_not_specialize=["T"])
def expert_rows_grad_kernel(
    grad,  # [T * K]
    order,  # [T * K] int64
    places,  # [T * K] int64
    out,  # [T, E] written
    T,
    E,
    K: tl.constexpr,
    TALL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    e = tl.arange(0, WIDTH)[None, :]
    dense = tl.zeros((TALL, WIDTH), out.dtype.element_ty)
    for j in tl.static_range(K):
        m = tl.load(order + t * K + j, t < T, other=0)
        expert = tl.load(places + m, t < T, other=-1) - t * E
        dense = tl.where(e == expert, tl.load(grad + m, t < T, other=0), dense)
    tl.store(out + t * E + e, dense, (t < T) & (e < E))


def tiles(experts: int) -> dict[str, int]:
    """Sizes of the tiles: 256 tokens a program, 1,024 entries of the map at once."""
    width = power_of_two(experts)
    tall = max(1, min(256, 1024 // width))
    return {"TALL": tall, "STEPS": 256 // tall, "WIDTH": width}
