"""What crosses ranks in `linear_logprob`: statistics, and hidden states and their gradients."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.fused_head.chunking import Chunk, Job
from pyrl_ext.loss.fused_head.tiles import operand
from pyrl_ext.loss.vocab_parallel import _combine


def combined(stats: Tensor, targets: Tensor, scale: Tensor, job: Job) -> tuple[Tensor, ...]:
    """This rank's statistics [4, n] -> (logprob, entropy, max, log_sum) over all ranks."""
    shards = stats[None]
    if job.ranks > 1:
        shards = stats.new_empty(job.ranks * 4, stats.shape[1])
        dist.all_gather_into_tensor(shards, stats.contiguous(), group=job.group)
        shards = shards.view(-1, *stats.shape)
    logprob, *rest = _combine(shards, scale)
    inside = (targets >= 0) & (targets < job.valid_vocab)
    return torch.where(inside, logprob, torch.nan), *rest


def hidden_chunks(hidden: Tensor, job: Job) -> Iterator[tuple[Chunk, Tensor]]:
    """Every chunk with its hidden states [c, H]; the next one is on its way meanwhile."""

    def start(chunk: Chunk) -> tuple[Tensor, Any]:
        part = hidden[chunk.rows]
        if job.shards == 1:
            return part, None
        out = part.new_empty(job.shards * part.shape[0], part.shape[1])
        return out, dist.all_gather_into_tensor(out, part, group=job.group, async_op=True)

    coming = None
    for i, chunk in enumerate(job.chunks):
        x, work = coming or start(chunk)
        coming = start(job.chunks[i + 1]) if i + 1 < len(job.chunks) else None
        if work is not None:
            work.wait()
        yield chunk, operand(x if chunk.pick is None else x.index_select(0, chunk.pick))


class HiddenGrad:
    """d(hidden), summed over ranks while the next chunk is computed."""

    def __init__(self, hidden: Tensor, job: Job):
        self.grad, self.job = torch.zeros_like(hidden), job
        self.work: Any = None

    def add(self, chunk: Chunk, part: Tensor) -> None:
        job, to = self.job, self.grad[chunk.rows]
        part = part.to(to.dtype)
        if chunk.pick is not None:
            everyone = part.new_zeros(job.shards * len(to), to.shape[1])
            part = everyone.index_copy_(0, chunk.pick, part)
        self.wait()  # one at a time: its buffer is let go
        if job.shards > 1:
            self.work = dist.reduce_scatter_tensor(to, part, group=job.group, async_op=True)
            return
        to.copy_(part)
        if job.ranks > 1:
            self.work = dist.all_reduce(to, group=job.group, async_op=True)

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.grad
