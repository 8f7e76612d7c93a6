"""The columns of the vocabulary that a rank holds, and the statistics of all ranks together."""

# torch.distributed is not fully typed, and torch 2.11 lacks the successors of what 2.13 deprecates
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportDeprecated=false

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def gather_shards(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Statistics [4, T] of this rank's shard -> [R, 4, T] of all ranks.

    Communicates: one all-gather of [4, T] over ``group``; nothing for None or one rank.
    """
    if group is None or group.size() == 1:
        return stats[None]
    shards = stats.new_empty(group.size() * 4, stats.shape[1])
    dist.all_gather_into_tensor(shards, stats.contiguous(), group=group)
    return shards.view(group.size(), *stats.shape)


def shard_columns(
    columns: int, valid_vocab: int, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """(first global column, number of valid columns) of this rank's shard."""
    first = 0 if group is None else group.rank() * columns
    return first, min(max(valid_vocab - first, 0), columns)
