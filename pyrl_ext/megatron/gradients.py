"""The gradient buffers of megatron's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def buffers(chunks: Sequence[Any]) -> list[Any]:
    """Of the parameters outside of experts, and of experts, chunk after chunk."""
    return [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def gather_shards(chunks: Sequence[Any]) -> None:
    """Complete buffers that the distributed optimizer left reduced in this rank's shard only.

    Communicates: all-gather of the gradients over the ranks that share them.
    """
    for buffer in buffers(chunks):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            mine = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
