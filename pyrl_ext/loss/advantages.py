"""Advantages: functions from rewards and groups to one number per sample."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def grpo(rewards: Tensor, groups: Tensor, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """``(reward - mean of its group) / (std of its group + eps)``, the division optional.

    Args:
        rewards: [S] float32.
        groups: [S] int64, samples with the same number form a group, in any order.
        normalize_std: divide by the sample standard deviation (n - 1) of the group.
        eps: added to the standard deviation [reward].

    Returns:
        [S] float32; exactly 0 in a group whose rewards are all equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300.
    """
    inverse = groups.unique(return_inverse=True)[1]  # pyright: ignore
    group = cast(Tensor, inverse)
    size = group.bincount().double()
    values = rewards.double()  # sums and means of equal float32 rewards are then exact

    def total(x: Tensor) -> Tensor:
        return torch.zeros_like(size).index_add(0, group, x)

    centred = values - (total(values) / size)[group]
    if normalize_std:
        std = (total(centred.square()) / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (std[group] + eps)
    return centred.float()
