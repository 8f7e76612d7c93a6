# the parameters of kernels have no types in Python
# pyright: reportMissingParameterType=false

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrl_ext.ops._op import refuse_dtype

BLOCK = 4096
ROWS = 128  # tokens of a program that combines shards


def refuse(logits: Tensor, *_: Any) -> str | None:
    return refuse_dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)


def stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None = None,
) -> Tensor:
    out = scale.new_empty(4, logits.shape[0])
    _stats(logits, targets, scale, first, width, keep_mask, out.unbind(), whole=False)
    return out


def rows(
    logits: Tensor, targets: Tensor, scale: Tensor, width: int, keep_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = [torch.empty_like(scale) for _ in range(4)]
    _stats(logits, targets, scale, 0, width, keep_mask, out, whole=True)
    return out[0], out[1], out[2], out[3]


def _stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None,
    out: Sequence[Tensor],
    whole: bool,
) -> None:
    """``out``: the four rows that are written."""
    tokens, columns = logits.shape
    if tokens == 0:
        return
    logits = logits.contiguous()
    targets = targets.contiguous()
    scale = scale.contiguous()
    keep = logits if keep_mask is None else keep_mask.contiguous().view(torch.uint8)
    token_logprob_stats_kernel[(tokens,)](  # type: ignore[arg-type]
        logits,
        targets,
        scale,
        keep,
        out[0],
        out[1],
        out[2],
        out[3],
        columns,
        first,
        width,
        MASKED=keep_mask is not None,
        WHOLE=whole,
        BLOCK=BLOCK,
        num_warps=8,  # type: ignore[call-arg]
    )


def combine(
    stats: Tensor, targets: Tensor, scale: Tensor, valid_vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = len(targets)
    out = [torch.empty_like(scale) for _ in range(4)]
    if tokens:
        token_logprob_combine_kernel[(-(-tokens // ROWS),)](  # type: ignore[arg-type]
            stats.contiguous(),
            targets.contiguous(),
            scale.contiguous(),
            out[0],
            out[1],
            out[2],
            out[3],
            len(stats),
            tokens,
            valid_vocab,
            ROWS=ROWS,
            num_warps=ROWS // 32,  # type: ignore[call-arg]
        )
    return out[0], out[1], out[2], out[3]


def grad(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    keep_mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    logits, tokens, columns = logits.contiguous(), *logits.shape
    out = torch.empty_like(logits, dtype=dtype) if out is None else out
    if out.numel() == 0:
        return out
    keep = logits if keep_mask is None else keep_mask.contiguous().view(torch.uint8)
    token_logprob_grad_kernel[(tokens, -(-columns // BLOCK))](  # type: ignore[arg-type]
        logits,
        targets.contiguous(),
        scale.contiguous(),
        max.contiguous(),
        log_sum.contiguous(),
        entropy.contiguous(),
        grad_logprob.contiguous(),
        grad_entropy.contiguous(),
        keep,
        out,
        columns,
        first,
        width,
        MASKED=keep_mask is not None,
        BLOCK=BLOCK,
        num_warps=8,  # type: ignore[call-arg]
    )
    return out


LOG2E = tl.constexpr(1.44269504)
LN2 = tl.constexpr(0.693147181)
VANISHES = tl.constexpr(-200.0)  # 2^z is 0 from here on; takes the place of -inf in products


# Rows are read one by one, so that nothing is gained by a variant for aligned ones
_ROW = ["targets", "scale", "max", "log_sum", "entropy", "grad_logprob", "grad_entropy"]


@triton.jit
def _store_rows(
    logprob, entropy, max, log_sum, t, top, total, weighted, target, scale, inside, mask
):
    log_total = tl.log(total)
    base = tl.where(top == -float("inf"), 0.0, top)
    value = tl.where(total == 0, -float("inf"), (target - base) * scale - log_total)
    tl.store(logprob + t, tl.where(inside, value, float("nan")), mask)
    tl.store(entropy + t, tl.where(total == 0, 0.0, log_total - weighted / total), mask)
    tl.store(max + t, top, mask)
    tl.store(log_sum + t, log_total, mask)


@triton.jit(do_not_specialize_on_alignment=[*_ROW[:2], "out0", "out1", "out2", "out3"])
def token_logprob_stats_kernel(
    logits,  # [T, columns] read
    targets,  # [T] int64
    scale,  # [T] float32
    keep,  # [T, columns] uint8, not read unless MASKED
    out0,  # [T] float32, written, as the next: the four statistics, or
    out1,  # log-prob, entropy, max, log_sum
    out2,
    out3,
    columns,
    first,
    width,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,  # the shard is the vocabulary
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = t * columns
    own = tl.load(scale + t)
    rate = own * LOG2E
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)  # a maximum for each lane
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        c = start + lane
        inside = c < width
        if MASKED:
            inside = inside & (tl.load(keep + row + c, inside, other=0) != 0)
        x = tl.load(logits + row + c, inside, other=-float("inf")).to(tl.float32)
        # the larger of two numbers has the exponential 1, so that one exponential is enough
        above = x > top
        rise = tl.where(above, x, top)
        base = tl.where(rise == -float("inf"), 0.0, rise)  # -inf - -inf is not a number
        fall = (tl.where(above, top, x) - base) * rate
        e = tl.exp2(fall)
        fall = tl.maximum(fall, VANISHES)
        own_one = 1.0 + (x - base)  # NaN for +inf
        weighted = tl.where(above, e * (weighted + fall * total), weighted + e * fall)
        total = tl.where(above, e * total + own_one, total + e)
        top = rise
    lane_top = top
    top = tl.max(top, 0)
    fall = (lane_top - tl.where(top == -float("inf"), 0.0, top)) * rate
    e = tl.exp2(fall)
    weight = tl.sum(e * (weighted + tl.maximum(fall, VANISHES) * total), 0)
    sum = tl.where(weight == weight, tl.sum(e * total, 0), weight)  # NaN shows
    target = tl.load(targets + t) - first
    mine = (target >= 0) & (target < width)
    kept = mine
    if MASKED:
        kept = mine & (tl.load(keep + row + target, mine, other=0) != 0)
    value = tl.load(logits + row + target, kept, other=-float("inf")).to(tl.float32)
    value = tl.where(mine, value, 0.0)
    if WHOLE:
        _store_rows(out0, out1, out2, out3, t, top, sum, weight * LN2, value, own, mine, t >= 0)
    else:
        tl.store(out0 + t, top)
        tl.store(out1 + t, sum)
        tl.store(out2 + t, weight * LN2)
        tl.store(out3 + t, value)


@triton.jit(
    do_not_specialize=["shards", "T", "valid_vocab"],
    do_not_specialize_on_alignment=["stats", "targets", "scale", *_ROW[2:5], "logprob"],
)
def token_logprob_combine_kernel(
    stats,  # [shards, 4, T] read
    targets,  # [T] int64
    scale,  # [T] float32
    logprob,  # [T] written, as the next three
    entropy,
    max,
    log_sum,
    shards,
    T,
    valid_vocab,
    ROWS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = t < T
    own = tl.load(scale + t, inside, other=1.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    for shard in range(shards):
        top = tl.maximum(top, tl.load(stats + shard * 4 * T + t, inside, other=0.0))
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    chosen = tl.zeros([ROWS], tl.float32)
    for shard in range(shards):
        at = stats + shard * 4 * T + t
        shift = (tl.load(at, inside, other=0.0) - base) * own
        factor = tl.exp(shift)
        shift = tl.where(factor == 0, 0.0, shift)  # 0 * -inf
        part = tl.load(at + T, inside, other=1.0)
        weighted += factor * (tl.load(at + 2 * T, inside, other=0.0) + shift * part)
        total += factor * part
        chosen += tl.load(at + 3 * T, inside, other=0.0)
    target = tl.load(targets + t, inside, other=0)
    known = (target >= 0) & (target < valid_vocab)
    _store_rows(logprob, entropy, max, log_sum, t, top, total, weighted, chosen, own, known, inside)


@triton.jit(do_not_specialize_on_alignment=_ROW)
def token_logprob_grad_kernel(
    logits,  # [T, columns] read
    targets,  # [T] int64
    scale,  # [T] float32, as the next five
    max,
    log_sum,
    entropy,
    grad_logprob,
    grad_entropy,
    keep,  # [T, columns] uint8, not read unless MASKED
    out,  # [T, columns] written, may be the logits
    columns,
    first,
    width,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = t * columns
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(scale + t)
    top = tl.load(max + t)
    gl = tl.load(grad_logprob + t)
    ge = tl.load(grad_entropy + t)
    dead = (top == -float("inf")) | ((gl == 0) & (ge == 0))
    inside = (c < width) & (dead == 0)
    if MASKED:
        inside = inside & (tl.load(keep + row + c, inside, other=0) != 0)
    x = tl.load(logits + row + c, inside, other=-float("inf")).to(tl.float32)
    z = (x - top) * (own * LOG2E) - tl.load(log_sum + t) * LOG2E
    constant = -own * (gl + ge * tl.load(entropy + t))
    g = tl.exp2(z) * (tl.maximum(z, VANISHES) * (-own * ge * LN2) + constant)
    g += tl.where(c == tl.load(targets + t) - first, own * gl, 0.0)
    g = tl.where(inside, g, 0.0)
    tl.store(out + row + c, g.to(out.dtype.element_ty), c < columns)
