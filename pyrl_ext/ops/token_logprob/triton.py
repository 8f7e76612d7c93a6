from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrl_ext.ops._triton import refuses

BLOCK = 4096
ROWS = 128  # tokens of a program that combines shards


refuse = refuses("logits", torch.float32, torch.bfloat16, torch.float16)


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
    from .triton_kernel import token_logprob_stats_kernel  # triton takes a while to import

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
    from .triton_kernel import token_logprob_combine_kernel  # triton takes a while to import

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
    from .triton_kernel import token_logprob_grad_kernel  # triton takes a while to import

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
