"""Log-probs and entropies from hidden states and the LM head by Triton kernels, as in verl.

Forward: a kernel multiplies tile by tile, a program some tokens with a split of the vocabulary,
and keeps of the logits only the running maximum, sum and entropy term; a second one merges the
splits. Backward: a kernel makes the logits of a split again and writes their gradient, which two
matrix products take to the hidden states and the weight. Sums over splits have the type of the
hidden states, as verl's. Over tensor-parallel ranks verl merges statistics by all-reduces besides.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# columns, those of verl
FORWARD_SPLIT = 1024
BACKWARD_SPLIT = 9504
TILE: dict[str, Any] = dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=32)
GROUP: dict[str, Any] = dict(GROUP=16)
OPTIONS: dict[str, Any] = dict(num_warps=8, num_stages=3)


@triton.jit
def _logits(
    hidden, weight, m, n, T, V, H, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] float32 of tokens ``m`` and columns ``n``; 0 outside."""
    of_token = hidden + m.to(tl.int64)[:, None] * H
    of_column = weight + n.to(tl.int64)[None, :] * H
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, H, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(of_token + k[None, :], (m < T)[:, None] & (k < H)[None, :], other=0.0)
        b = tl.load(of_column + k[:, None], (k < H)[:, None] & (n < V)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def split_stats_kernel(
    hidden,  # [T, H] read
    weight,  # [V, H] read
    targets,  # [T] int64
    parts,  # [3, splits, T] float32, written: maximum, sum of exp, sum of logit * exp
    found,  # [T] float32, written: the target's logit
    T, V, H, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    target = tl.load(targets + m, m < T, other=-1)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)
    for first in range(split * SPLIT, tl.minimum(V, (split + 1) * SPLIT), BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        logits = _logits(hidden, weight, m, n, T, V, H, BLOCK_M, BLOCK_N, BLOCK_K)
        hit = tl.sum(tl.where(n[None, :] == target[:, None], logits, 0.0), 1)
        tl.store(found + m, hit, (target >= first) & (target < first + BLOCK_N))
        rise = tl.maximum(top, tl.max(tl.where((n < V)[None, :], logits, -float("inf")), 1))
        e = tl.where((n < V)[None, :], tl.exp(logits - rise[:, None]), 0.0)
        factor = tl.exp(top - rise)
        total = total * factor + tl.sum(e, 1)
        weighted = weighted * factor + tl.sum(e * logits, 1)
        top = rise
    at = parts + split.to(tl.int64) * T + m
    tl.store(at, top, m < T)
    tl.store(at + splits.to(tl.int64) * T, total, m < T)
    tl.store(at + 2 * splits.to(tl.int64) * T, weighted, m < T)


@triton.jit
def merge_splits_kernel(
    parts,  # [3, splits, T] float32, read
    found,  # [T] float32, read
    out,  # [4, T] float32, written: log-prob, entropy, maximum, sum of exp
    T, splits, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        at = parts + tl.cast(split, tl.int64) * T + m
        theirs = tl.load(at, m < T, other=0.0)
        rise = tl.maximum(top, theirs)
        mine = tl.exp(top - rise)
        factor = tl.exp(theirs - rise)
        rows = tl.cast(splits, tl.int64) * T
        total = total * mine + tl.load(at + rows, m < T, other=1.0) * factor
        weighted = weighted * mine + tl.load(at + 2 * rows, m < T, other=0.0) * factor
        top = rise
    log_sum = top + tl.log(total)
    tl.store(out + m, tl.load(found + m, m < T, other=0.0) - log_sum, m < T)
    tl.store(out + T + m, log_sum - weighted / total, m < T)
    tl.store(out + 2 * T + m, top, m < T)
    tl.store(out + 3 * T + m, total, m < T)


@triton.jit
def split_grad_kernel(
    hidden,  # [T, H] read
    weight,  # [V, H] read
    targets,  # [T] int64
    forward,  # [4, T] float32, what merge_splits_kernel wrote
    grads,  # [2, T] float32, of log-probs and entropies
    out,  # [T, width] written: d(logits) of columns first ... first + width
    T, V, H, first, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Programs take GROUP blocks of tokens before the next columns, for the L2's sake."""
    rows = tl.cdiv(T, BLOCK_M)
    columns = tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    in_group = GROUP * columns
    above = (program // in_group) * GROUP
    high = tl.minimum(rows - above, GROUP)
    m = (above + (program % in_group) % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = ((program % in_group) // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = m < T
    target = tl.load(targets + m, inside, other=-1)
    entropy = tl.load(forward + T + m, inside, other=0.0)
    log_sum = tl.load(forward + 2 * T + m, inside, other=0.0)
    log_sum += tl.log(tl.load(forward + 3 * T + m, inside, other=1.0))
    gl = tl.load(grads + m, inside, other=0.0)
    ge = tl.load(grads + T + m, inside, other=0.0)
    n = first + c
    z = _logits(hidden, weight, m, n, T, V, H, BLOCK_M, BLOCK_N, BLOCK_K) - log_sum[:, None]
    g = -tl.exp(z) * (gl[:, None] + ge[:, None] * (z + entropy[:, None]))
    g += tl.where(n[None, :] == target[:, None], gl[:, None], 0.0)
    at = out + m.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(at, g.to(out.dtype.element_ty), inside[:, None] & (c < width)[None, :])


class _SplitLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, splits: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        (tokens, size), vocab = hidden.shape, len(weight)
        count = -(-vocab // splits[0])
        parts = torch.empty(3, count, tokens, device=hidden.device)
        found = parts.new_zeros(tokens)
        out = parts.new_empty(4, tokens)
        split_stats_kernel[triton.cdiv(tokens, TILE["BLOCK_M"]), count](  # type: ignore[arg-type]
            hidden,
            weight,
            targets,
            parts,
            found,
            tokens,
            vocab,
            size,
            splits[0],  # type: ignore[arg-type]
            **TILE,
            **OPTIONS,
        )
        merge_splits_kernel[(triton.cdiv(tokens, 128),)](parts, found, out, tokens, count, 128)  # type: ignore
        ctx.save_for_backward(hidden, weight, targets, out)
        ctx.split = splits[1]
        return out[0], out[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, targets, out = ctx.saved_tensors
        (tokens, size), vocab = hidden.shape, len(weight)
        both = torch.stack(grads).float()
        of_weight = torch.empty_like(weight)
        of_hidden = torch.zeros_like(hidden)
        for first in range(0, vocab, ctx.split):
            width = min(ctx.split, vocab - first)
            of_logits = hidden.new_empty(tokens, width)
            programs = triton.cdiv(tokens, TILE["BLOCK_M"]) * triton.cdiv(width, TILE["BLOCK_N"])
            split_grad_kernel[(programs,)](
                hidden,
                weight,
                targets,
                out,
                both,
                of_logits,
                tokens,
                vocab,
                size,
                first,
                width,
                **TILE,
                **GROUP,
                **OPTIONS,
            )
            rows = slice(first, first + width)
            of_hidden += of_logits @ weight[rows]
            torch.mm(of_logits.t(), hidden, out=of_weight[rows])
        return of_hidden, of_weight, None, None


def split_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    splits: tuple[int, int] = (FORWARD_SPLIT, BACKWARD_SPLIT),
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) [T] float32 of ``hidden @ weight.T``.

    Args:
        hidden:  [T, H] contiguous.
        weight:  [V, H] contiguous.
        targets: [T] int64, columns.
        splits:  columns of a split, forward and backward.
    """
    return _SplitLogprob.apply(hidden, weight, targets, splits)  # type: ignore[return-value]
