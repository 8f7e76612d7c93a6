# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._packages import power_of_two
from pyrl_ext.ops.rotary.native import heads_of

from . import new_grads, new_outputs


def latent_keys(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    both = heads_of(both)
    shared = heads_of(shared)
    key, value = new_outputs(both, shared, plain)
    _launch(key, value, both, shared, back=False)
    return key, value


def latent_keys_grad(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    key = heads_of(key)
    value = heads_of(value)
    both, shared = new_grads(key, value, plain)
    _launch(key, value, both, shared, back=True)
    return both, shared


def _launch(key: Tensor, value: Tensor, both: Tensor, shared: Tensor, back: bool) -> None:
    if not len(key):
        return
    common = shared.shape[1]
    sizes = key.shape[1], key.shape[2] - common, common, value.shape[2]
    kernel: Any = latent_keys_kernel
    kernel[(len(key),)](
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        both,
        *both.stride()[:2],
        shared,
        shared.stride(0),
        *sizes,
        BACK=back,
        ACC=tl.float64 if key.dtype == torch.float64 else tl.float32,
        **tiles(*sizes),
    )


@triton.jit
def latent_keys_kernel(
    key,  # [T, HEADS, PLAIN + COMMON]: written; with BACK its gradient, read
    key_row,
    key_head,
    value,  # [T, HEADS, REST], as `key`
    value_row,
    value_head,
    both,  # [T, HEADS, PLAIN + REST]: read; with BACK its gradient, written
    both_row,
    both_head,
    shared,  # [T, COMMON], as `both`
    shared_row,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    COMMON: tl.constexpr,
    REST: tl.constexpr,
    BACK: tl.constexpr,
    ACC: tl.constexpr,
    TALL: tl.constexpr,  # heads of a tile
    P: tl.constexpr,  # powers of two from PLAIN up,
    C: tl.constexpr,  # from COMMON up,
    R: tl.constexpr,  # from REST up
):
    t = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P)[None, :]
    c = tl.arange(0, C)[None, :]
    r = tl.arange(0, R)[None, :]
    total = tl.zeros((1, C), ACC)
    for first in range(0, HEADS, TALL):
        h = first + tl.arange(0, TALL)[:, None].to(tl.int64)
        k = key + t * key_row + h * key_head
        v = value + t * value_row + h * value_head
        b = both + t * both_row + h * both_head
        here = (h < HEADS) & (p < PLAIN)
        common = (h < HEADS) & (c < COMMON)
        rest = (h < HEADS) & (r < REST)
        if BACK:
            tl.store(b + p, tl.load(k + p, here, other=0), here)
            tl.store(b + PLAIN + r, tl.load(v + r, rest, other=0), rest)
            term = tl.load(k + PLAIN + c, common, other=0).to(ACC)
            total += tl.sum(term, 0, keep_dims=True)
        else:
            tl.store(k + p, tl.load(b + p, here, other=0), here)
            one = tl.load(shared + t * shared_row + c, c < COMMON, other=0)
            tl.store(k + PLAIN + c, tl.broadcast_to(one, (TALL, C)), common)
            tl.store(v + r, tl.load(b + PLAIN + r, rest, other=0), rest)
    if BACK:
        tl.store(shared + t * shared_row + c, total.to(shared.dtype.element_ty), c < COMMON)


def tiles(heads: int, plain: int, common: int, rest: int) -> dict[str, int]:
    """Sizes of tiles: powers of two."""

    sizes = {"P": power_of_two(plain), "C": power_of_two(common), "R": power_of_two(rest)}
    return {"TALL": max(1, min(power_of_two(heads), 2048 // max(sizes.values()))), **sizes}
