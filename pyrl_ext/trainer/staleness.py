"""Metrics by the age of tokens and trajectories, of runs that generate ahead of the trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.trainer.policy import Scores


def ages_of(shard: BatchShard, step: int, plan: Plan) -> Tensor:
    """[N, A] bool, True where a row of the last stage has age 0 .. A - 1 in ``step``."""
    most = plan.rollout.ahead + 1  # a group that is carried is one older, where that is trained
    ages = (step - shard.columns["versions"]).clamp(0, most)
    return ages[:, None] == torch.arange(most + 1)


def by_age(
    shard: BatchShard, scores: Scores, index: BatchIndex, step: int, plan: Plan, topo: Topology
) -> dict[str, float]:
    """Metrics of each age that the batch has, under their glossary names.

    Args:
        shard: with ``ages``.
        scores: of the policy before the update.
        step: that is trained, the trainer's version.

    Communicates: two numbers for each age. Syncs: yes.
    """
    sums = torch.zeros(2, plan.rollout.ahead + 2, dtype=torch.float64)
    if shard.role.last_stage:
        mask = shard.columns["loss_mask_0"]
        gap = (scores.logprobs - shard.columns["rollout_logprobs"])[mask].abs().double()
        sums = torch.stack([torch.ones_like(gap), gap]) @ shard.columns["ages"][mask].double()
    counts, gaps = sum_over_ranks(sums, topo).tolist()
    metrics = dict[str, float]()
    for age, (count, gap) in enumerate(zip(counts, gaps, strict=True)):
        if count:
            metrics[f"age/share_{age}"] = count / sum(counts)
            metrics[f"age/mismatch_{age}"] = gap / count
    oldest = step - index.versions[index.firsts]
    rewards = index.rewards[index.firsts]
    for age in sorted({*oldest.tolist()}):
        metrics[f"age/reward_{age}"] = float(rewards[oldest == age].mean())
    return metrics
