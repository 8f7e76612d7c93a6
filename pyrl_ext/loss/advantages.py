"""Advantages: functions from the rewards of trajectories to one number a trajectory.

A trajectory counts once in the baseline of its group, however many samples it was cut into.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6  # added to standard deviations and means [reward]


@dataclass(frozen=True)
class Trajectories:
    """J trajectories, each with one reward.

    Args:
        rewards: [J] float64.
        groups:  [J] int64, 0 .. G - 1: the group of each.
        tokens:  [J] float64, loss tokens of each.
    """

    rewards: Tensor
    groups: Tensor
    tokens: Tensor

    def total(self, values: Tensor) -> Tensor:
        """[J] float64, the sum of ``values`` over each one's group."""
        sums = values.new_zeros(int(self.groups.max()) + 1)
        return sums.index_add(0, self.groups, values)[self.groups]

    @property
    def size(self) -> Tensor:
        """[J] float64, trajectories in each one's group."""
        return self.total(torch.ones_like(self.rewards))

    @property
    def mean(self) -> Tensor:
        """[J] float64, mean reward of each one's group."""
        return self.total(self.rewards) / self.size


def grpo(
    given: Trajectories, normalize_std: bool = True, leave_one_out: bool = False, eps: float = EPS
) -> Tensor:
    """``(r - mean of the group) / (std of the group + eps)``, the division optional.

    Args:
        normalize_std: divide by the sample standard deviation (n - 1) of the group.
        leave_one_out: the mean is that of the group's other trajectories.
        eps: added to the standard deviation [reward].

    Returns:
        [J] float64; exactly 0 in a group whose rewards are all equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300; without the division: Dr.GRPO,
    https://arxiv.org/abs/2503.20783.
    """
    centred = given.rewards - given.mean
    std = (given.total(centred.square()) / (given.size - 1).clamp(min=1)).sqrt()
    if leave_one_out:
        centred = rloo(given)
    return centred / (std + eps) if normalize_std else centred


def rloo(given: Trajectories) -> Tensor:
    """``r - mean reward of the group's other trajectories``; 0 in a group of one.

    Source: https://arxiv.org/abs/2402.14740.
    """
    size = given.size
    return (given.rewards - given.mean) * size / (size - 1).clamp(min=1)


def opo(given: Trajectories) -> Tensor:
    """``r - sum(tokens r) / sum(tokens)`` over the group: the baseline of least variance, where
    long responses have as much larger gradients.

    Source: https://arxiv.org/abs/2505.23585.
    """
    baseline = given.total(given.tokens * given.rewards) / given.total(given.tokens).clamp(min=1)
    return _of_several(given, given.rewards - baseline)


def reinforce_pp(given: Trajectories, baseline: bool = False, eps: float = EPS) -> Tensor:
    """``(x - mean) / (std + eps)`` over all loss tokens of the batch, where x is the reward.

    Args:
        baseline: x is the reward less the mean of its group; a trajectory that is alone in its
            group gets 0.

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, without a discount.
    """
    values = given.rewards - given.mean if baseline else given.rewards
    tokens = given.tokens.sum().clamp(min=1)
    centred = values - (given.tokens * values).sum() / tokens
    variance = (given.tokens * centred.square()).sum() / (tokens - 1).clamp(min=1)
    found = centred / (variance.sqrt() + eps)
    return torch.where(given.size > 1, found, 0) if baseline else found


def maxrl(given: Trajectories, eps: float = EPS) -> Tensor:
    """``(r - mean of the group) / (mean of the group + eps)``, for rewards of 0 and more: the
    gradient of the log-likelihood of success, to first order.

    Source: https://arxiv.org/abs/2602.02710.
    """
    centred = given.rewards - given.mean
    return centred / (given.mean + eps)


def none(given: Trajectories) -> Tensor:
    """0: rewards are not trained on."""
    return torch.zeros_like(given.rewards)


def _of_several(given: Trajectories, values: Tensor) -> Tensor:
    """``values``; exactly 0 where a trajectory is alone in its group, or all its rewards equal."""
    spread = given.total((given.rewards - given.mean).square())
    return torch.where(spread > 0, values, 0)
