"""Metrics of a step by source of prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyrl_ext.pack.index import BatchIndex


def source_metrics(
    index: BatchIndex, source_of: Callable[[int], str], pass_reward: float
) -> dict[str, float]:
    """Metrics of each source that has samples, under their glossary names.

    Args:
        index: of all samples that were generated.
        source_of: group -> name of its source.
        pass_reward: smallest reward of a response that passes.
    """
    rewards = index.rewards[index.firsts]
    groups = index.groups[index.firsts]
    lengths = index.per_trajectory(index.sampled)
    owners = {group: source_of(group) for group in np.unique(groups).tolist()}
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(owners.values()):
        members = [group for group, owner in owners.items() if owner == name]
        own = np.isin(groups, members)
        metrics |= {
            f"source/{name}/reward": float(rewards[own].mean()),
            f"source/{name}/solved": float((rewards[own] >= pass_reward).mean()),
            f"source/{name}/response_len": float(lengths[own].mean()),
            f"source/{name}/groups": len(members),
        }
    return metrics
