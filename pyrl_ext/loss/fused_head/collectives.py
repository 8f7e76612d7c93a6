"""Communication of `linear_logprob`: hidden states and their gradients, chunk by chunk."""

# torch.distributed is not fully typed, and torch 2.11 lacks the successors of what 2.13 deprecates
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportDeprecated=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.fused_head.chunking import CallPlan, Chunk
from pyrl_ext.loss.fused_head.tiles import operand
from pyrl_ext.loss.vocab_parallel import gather_shards
from pyrl_ext.ops import token_logprob_combine


def distribution_of(
    stats: Tensor, targets: Tensor, scale: Tensor, call: CallPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's statistics [4, n] -> (logprob, entropy, max, log_sum) over all ranks.

    Communicates: one all-gather of [4, n].
    """
    shards = gather_shards(stats, call.group)
    return token_logprob_combine(shards, targets, scale, call.valid_vocab)


def hidden_chunks(hidden: Tensor, call: CallPlan) -> Iterator[tuple[Chunk, Tensor]]:
    """Every chunk with its hidden states [c, H]; the next one is gathered meanwhile.

    Communicates: with sequence parallelism an all-gather of each chunk.
    """

    def start(chunk: Chunk) -> tuple[Tensor, dist.Work | None]:
        local = hidden[chunk.rows]
        if call.shards == 1:
            return local, None
        gathered = local.new_empty(call.shards * local.shape[0], local.shape[1])
        work = dist.all_gather_into_tensor(gathered, local, group=call.group, async_op=True)
        return gathered, work

    coming = None
    for i, chunk in enumerate(call.chunks):
        x, work = coming or start(chunk)
        coming = start(call.chunks[i + 1]) if i + 1 < len(call.chunks) else None
        if work is not None:
            work.wait()
        yield chunk, operand(x if chunk.pick is None else x.index_select(0, chunk.pick))


class HiddenGrad:
    """d(hidden), summed over ranks while the next chunk is computed.

    Communicates: an all-reduce of each chunk; with sequence parallelism a reduce-scatter.
    """

    def __init__(self, hidden: Tensor, call: CallPlan):
        self.grad = torch.zeros_like(hidden)
        self.call = call
        self.work: dist.Work | None = None

    def add(self, chunk: Chunk, grad: Tensor) -> None:
        """Add this rank's part [c, H] of a chunk."""
        call = self.call
        rows = self.grad[chunk.rows]
        grad = grad.to(rows.dtype)
        if chunk.pick is not None:
            zeros = grad.new_zeros(call.shards * len(rows), rows.shape[1])
            grad = zeros.index_copy_(0, chunk.pick, grad)
        self.wait()  # one at a time: its buffer is freed
        if call.shards > 1:
            self.work = dist.reduce_scatter_tensor(rows, grad, group=call.group, async_op=True)
            return
        rows.copy_(grad)
        if call.ranks > 1:
            self.work = dist.all_reduce(rows, group=call.group, async_op=True)

    def wait(self) -> Tensor:
        """d(hidden) once the sum of the last chunk has arrived."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.grad
