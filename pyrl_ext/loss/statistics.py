"""Statistics of tokens over parts of the vocabulary: merged exactly, then log-prob and entropy.

The statistics of a part are those of `token_logprob_stats`: [4, T] the maximum, sum(e),
sum(e * d) and the target's logit, with ``d = (logits - max) * scale`` and ``e = exp(d)``.
"""

# torch.distributed is not fully typed, and torch 2.11 lacks the successors of what 2.13 deprecates
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportDeprecated=false

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def merge_parts(parts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics [R, 4, T] of R parts of the vocabulary -> the four of all parts, [T] each."""
    tops, sums, weights, targets = parts.unbind(1)
    top = tops.amax(0)
    shift = (tops - _finite(top)) * scale
    factor = shift.exp()
    shift = shift.masked_fill(factor == 0, 0)  # 0 * -inf
    weighted = (factor * (weights + shift * sums)).sum(0)
    return top, (factor * sums).sum(0), weighted, targets.sum(0)


def distribution(
    parts: Tensor, targets: Tensor, scale: Tensor, valid_vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics [R, 4, T] of all shards -> (logprob, entropy, max, log_sum), [T] each.

    The log-prob is NaN for a target outside ``[0, valid_vocab)``. A token without a finite logit
    has log-prob -inf and entropy 0. Ranks hold the same ``parts`` and add them in the same order,
    so they get the same bits.
    """
    top, total, weighted, target_logit = merge_parts(parts, scale)
    log_sum = total.log()
    logprob = (target_logit - _finite(top)) * scale - log_sum
    logprob = torch.where(total == 0, -torch.inf, logprob)
    entropy = torch.where(total == 0, 0, log_sum - weighted / total)
    inside = (targets >= 0) & (targets < valid_vocab)
    return torch.where(inside, logprob, torch.nan), entropy, top, log_sum


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


def _finite(top: Tensor) -> Tensor:
    """The maximum, 0 where there is no finite logit at all."""
    return top.masked_fill(top == -torch.inf, 0)
