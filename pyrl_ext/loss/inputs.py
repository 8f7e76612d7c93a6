"""The loss contract: the inputs and results of a loss, and arithmetic that all losses share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: a larger ratio carries no information, only overflow


Sums = dict[str, tuple[Tensor, Tensor]]


AdvantageFn = Callable[[Tensor, Tensor], Tensor]


LossFn = Callable[[Tensor, Tensor | None, "LossInputs"], tuple[Tensor, Tensor, Sums]]


class ObjectiveConfig(Protocol):
    """The ``objective`` section of the plan."""

    @property
    def advantage(self) -> str: ...
    @property
    def normalize_std(self) -> bool: ...
    @property
    def loss(self) -> str: ...
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def entropy_coef(self) -> float: ...
    @property
    def tis_cap(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss beside the current log-probs, all [T] on the same device.

    Args:
        old_logprobs: float32, of the target in the policy before the update [nats].
        rollout_logprobs: float32, in the engine's distribution [nats].
        ref_logprobs: float32, in the reference policy [nats]; or None.
        advantages: float32.
        loss_mask: bool; padding rows are False.
    """

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` with 0 in rows outside the mask, whatever they hold, and no gradient there."""
    return torch.where(mask, x, 0)


def clamp_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The log-ratio clamped so that exp cannot overflow, and a mask of what that changed."""
    return (
        log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
        log_ratio.detach().abs() > LOG_RATIO_LIMIT,
    )


def missing_input(coefficient: str, value: float, needed: str) -> str:
    """The message about a coefficient whose term lacks an input."""
    return f"grpo_loss: {coefficient} is {value} and {needed} is None, expected {needed}"
