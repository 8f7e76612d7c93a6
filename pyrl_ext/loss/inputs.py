"""The loss contract: the inputs and results of a loss, and arithmetic that all losses share."""

# torch.distributed is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: a larger ratio carries no information, only overflow


Sums = dict[str, tuple[Tensor, Tensor]]


# (rewards [J], groups [J], loss tokens [J]) of J trajectories -> [J]
AdvantageFn = Callable[[Tensor, Tensor, Tensor], Tensor]


LossFn = Callable[[Tensor, Tensor | None, "LossInputs"], tuple[Tensor, Tensor, Sums]]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Means over the loss tokens of sequences whose rows several ranks may share.

    Args:
        ids:    [T] int64, sequence of each row, 0 .. count - 1; any in padding.
        count:  of the sequences in this pass.
        shares: [T] float, 1 / (loss tokens of the row's sequence on all ranks); 0 outside the mask.
        group:  context-parallel ranks that share the rows; None: this rank has them all.
    """

    ids: Tensor
    count: int
    shares: Tensor
    group: dist.ProcessGroup | None = None

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [T], of each row's sequence; differentiable.

        Communicates: an all-reduce of [count] over ``group``, and one in the backward.
        """
        sums = values.new_zeros(self.count)
        sums = sums.index_add(0, self.ids, values * self.shares.to(values.dtype))
        if self.group is not None:
            sums = cast(Tensor, cast(Any, _SumOverRanks).apply(sums, self.group))
        return sums.index_select(0, self.ids)


class _SumOverRanks(torch.autograd.Function):
    """Each rank reads the sum in its own rows, so its gradient is the sum over ranks as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_reduced(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_reduced(grads[0], ctx.group), None


def _all_reduced(values: Tensor, group: Any) -> Tensor:
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return total


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss in addition to the current log-probs, all [T] on the same device.

    Args:
        old_logprobs: float32, of the target in the policy before the update [nats].
        rollout_logprobs: float32, in the engine's distribution [nats].
        ref_logprobs: float32, in the reference policy [nats]; or None.
        advantages: float32.
        loss_mask: bool; padding rows are False.
        weights: float32, of the token in the reduction; None: 1.
        corrections: float32, of its policy term; None: 1.
        sequences: means over whole sequences; None: no part needs them.
        ages: [T, A] bool, whether the token is of age 0 .. A - 1 (`rollout.ahead`), for metrics;
            None: no token is old.
        divergence: float32 with gradient, of the policy now from the teacher (`objective.distill`)
            [nats]; None: there is none.
    """

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    weights: Tensor | None = None
    corrections: Tensor | None = None
    sequences: Sequences | None = None
    ages: Tensor | None = None
    divergence: Tensor | None = None


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
    return f"policy_loss: {coefficient} is {value} and {needed} is None, expected {needed}"
