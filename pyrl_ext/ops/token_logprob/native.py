from typing import Any, cast

import torch
from torch import Tensor

from pyrl_ext.ops._native import C, address, dtype_of, launch, refuses
from pyrl_ext.ops.tensors import on_gpu

from . import reference

refuse = refuses("token_logprob_stats", torch.float32, torch.bfloat16, torch.float16)


class Shard:
    """Contiguous tensors whose addresses ``C.LogitsShard`` holds; keeps them alive."""

    def __init__(self, logits: Tensor, targets: Tensor, scale: Tensor, keep: Tensor | None):
        self.logits = logits.contiguous()
        self.targets = targets.contiguous()
        self.scale = scale.contiguous()
        self.keep = None if keep is None else keep.contiguous()

    def columns(self, first: int, width: int) -> Any:
        tokens, columns = self.logits.shape
        return C.LogitsShard(
            logits=self.logits.data_ptr(),
            dtype=dtype_of(self.logits),
            tokens=tokens,
            columns=columns,
            width=width,
            targets=self.targets.data_ptr(),
            first=first,
            scale=self.scale.data_ptr(),
            keep=address(self.keep),
        )


def row_grad(rows: list[Tensor]) -> Any:
    """``C.RowGrad`` of max, log_sum, entropy, grad_logprob, grad_entropy, all contiguous."""
    names = ("max", "log_sum", "entropy", "grad_logprob", "grad_entropy")
    return C.RowGrad(**{name: row.data_ptr() for name, row in zip(names, rows)})


def stats(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    first: int,
    width: int,
    keep_mask: Tensor | None = None,
    isa: str = "auto",
) -> Tensor:
    """``isa``: instruction set on a CPU."""
    shard = Shard(logits, targets, scale, keep_mask)
    out = scale.new_empty(4, logits.shape[0])
    if on_gpu(logits):
        _stats_cuda(shard, first, width, C.StatsOut(stats=out.data_ptr()))
    else:
        call = dict(shard=shard.columns(first, width), stats=out.data_ptr())
        launch("token_logprob_stats", logits.device, isa, **call)
    return out


def _stats_cuda(shard: Shard, first: int, width: int, out: Any) -> None:
    size = C.token_logprob_scratch(tokens=len(shard.targets), width=width)
    scratch = shard.scale.new_empty(size)
    call = dict(shard=shard.columns(first, width), out=out, scratch=scratch.data_ptr())
    launch("token_logprob_stats", scratch.device, **call)


def rows(
    logits: Tensor, targets: Tensor, scale: Tensor, width: int, keep_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not on_gpu(logits):
        found = stats(logits, targets, scale, 0, width, keep_mask)
        return reference.combine(found[None], targets, scale, width)
    shard, (out, addresses) = Shard(logits, targets, scale, keep_mask), new_rows(scale)
    _stats_cuda(shard, 0, width, C.StatsOut(rows=addresses))
    return out


def combine(
    stats: Tensor, targets: Tensor, scale: Tensor, valid_vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """On a CPU torch's operations on [R, T]: no loop of ours would be faster."""
    if not on_gpu(stats):
        return reference.combine(stats, targets, scale, valid_vocab)
    stats = stats.contiguous()
    targets = targets.contiguous()
    scale = scale.contiguous()
    out, addresses = new_rows(scale)
    shards = shard_stats(stats, targets, scale, valid_vocab)
    launch("token_logprob_combine", stats.device, shards=shards, rows=addresses)
    return out


def new_rows(scale: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any]:
    """Log-prob, entropy, max and log_sum, [T] each, and their ``C.TokenRows``."""
    rows = tuple(torch.empty_like(scale) for _ in range(4))
    return cast(Any, rows), C.TokenRows(*(row.data_ptr() for row in rows))


def shard_stats(stats: Tensor, targets: Tensor, scale: Tensor, valid_vocab: int) -> Any:
    """``C.ShardStats`` of contiguous tensors."""
    return C.ShardStats(
        stats=stats.data_ptr(),
        shards=len(stats),
        tokens=len(targets),
        targets=targets.data_ptr(),
        scale=scale.data_ptr(),
        valid_vocab=valid_vocab,
    )


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
    isa: str = "auto",
) -> Tensor:
    shard = Shard(logits, targets, scale, keep_mask)
    if out is None:
        out = torch.empty_like(shard.logits, dtype=dtype if on_gpu(logits) else None)
    rows = [r.contiguous() for r in (max, log_sum, entropy, grad_logprob, grad_entropy)]
    call = dict(shard=shard.columns(first, width), row=row_grad(rows), out=out.data_ptr())
    if on_gpu(logits):
        launch("token_logprob_grad", logits.device, **call, dtype=dtype_of(out))
        return out
    launch("token_logprob_grad", logits.device, isa, **call)
    return out if dtype is None else out.to(dtype)
