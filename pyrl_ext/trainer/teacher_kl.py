"""The distance to the teacher by source of prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology


def teacher_kl_by_source(
    shard: BatchShard, index: BatchIndex, source_of: Callable[[int], str], topo: Topology
) -> dict[str, float]:
    """``source/<name>/teacher_kl`` of each source with loss tokens.

    Args:
        shard: with ``old_logprobs`` and ``teacher_logprobs``.
        source_of: group -> name of its source.

    Communicates: two numbers for each source. Syncs: yes.
    """
    of_sample = np.array([source_of(group) for group in index.groups.tolist()])
    names, numbers = np.unique(of_sample, return_inverse=True)
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    if shard.role.last_stage:
        columns = shard.columns
        mask = columns["loss_mask_0"]
        gap = (columns["old_logprobs"] - columns["teacher_logprobs"])[mask].double()
        of_row = torch.from_numpy(numbers[shard.lengths.sample_of(shard.rows.tokens)])
        sums.index_add_(0, of_row[mask], torch.stack([gap, torch.ones_like(gap)], 1))
    metrics = dict[str, float]()
    for name, (total, count) in zip(names, sum_over_ranks(sums, topo).tolist(), strict=True):
        if count:
            metrics[f"source/{name}/teacher_kl"] = total / count
    return metrics
