"""Policy terms: the loss of each token from its ratio and advantage, one function each.

``d`` is the log of the ratio, clamped to +-20; ``r = exp(d)``; ``A`` the advantage; ``sg`` stops
the gradient; ``lo`` and ``hi`` are clip_low and clip_high. Every function returns the loss [T] and
where the ratio is clipped [T] bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyrl_ext.loss.inputs import Sequences
from pyrl_ext.plan.schema.objective import Objective


class Scored(NamedTuple):
    """T tokens under the current policy; rows outside the loss mask hold zeros.

    Args:
        log_ratio: [T] d, with a gradient.
        logprobs: [T] of the token now [nats], with a gradient.
        anchor: [T] of the token in the policy that the ratio compares with [nats].
        advantages: [T].
        sequences: means over sequences; None: no part asks for them.
    """

    log_ratio: Tensor
    logprobs: Tensor
    anchor: Tensor
    advantages: Tensor
    sequences: Sequences | None


Term = Callable[[Scored, Objective], tuple[Tensor, Tensor]]


def ppo(given: Scored, config: Objective) -> tuple[Tensor, Tensor]:
    """``max(-A r, -A clip(r, 1 - lo, 1 + hi))``; with dual_clip c, where A < 0, at most ``-c A``.

    Source: PPO, https://arxiv.org/abs/1707.06347; separate clips, DAPO,
    https://arxiv.org/abs/2503.14476; dual clip, https://arxiv.org/abs/1912.09729.
    """
    ratio = given.log_ratio.exp()
    advantages = given.advantages
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = _clipped(ratio, advantages, low, high)
    if config.dual_clip is not None:
        most = -config.dual_clip * advantages
        limited = (advantages < 0) & (loss > most)
        loss = torch.where(limited, most, loss)
        clipped = clipped | limited
    return loss, clipped


def cispo(given: Scored, config: Objective) -> tuple[Tensor, Tensor]:
    """``-sg[clip(r, 1 - lo, 1 + hi)] A logp``: a clipped ratio weighs, and stops no gradient.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585.
    """
    ratio = given.log_ratio.detach().exp()
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    loss = -ratio.clamp(low, high) * given.advantages * given.logprobs
    return loss, (ratio < low) | (ratio > high)


def sapo(given: Scored, config: Objective) -> tuple[Tensor, Tensor]:
    """``-A sigmoid(t (r - 1)) 4 / t``, t by the sign of A (sapo_tau); nothing is clipped.

    Source: https://arxiv.org/abs/2511.20347.
    """
    advantages = given.advantages
    positive, negative = config.sapo_tau
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    gate = torch.sigmoid(tau * (given.log_ratio.exp() - 1)) * 4 / tau
    return -advantages * gate, torch.zeros_like(advantages, dtype=torch.bool)


def gmpo(given: Scored, config: Objective) -> tuple[Tensor, Tensor]:
    """``-A exp(mean over the sequence of c)``, where ``c = min(d, hi)`` for A > 0 and
    ``max(d, -lo)`` for A < 0: the geometric mean of ratios, each clipped where it would gain.

    Source: https://arxiv.org/abs/2507.20673.
    """
    assert given.sequences is not None
    d = given.log_ratio
    advantages = given.advantages
    clipped = ((advantages > 0) & (d > config.clip_high)) | (
        (advantages < 0) & (d < -config.clip_low)
    )
    bounded = torch.where(clipped, d.clamp(-config.clip_low, config.clip_high), d)
    return -advantages * given.sequences.mean(bounded).exp(), clipped


def dppo(given: Scored, config: Objective) -> tuple[Tensor, Tensor]:
    """``-A r``, 0 where A > 0 and p - mu > hi, or A < 0 and mu - p > lo: p and mu are the token's
    probabilities now and in the anchor.

    Source: the total-variation mask of DPPO, https://arxiv.org/abs/2602.04879.
    """
    advantages = given.advantages
    change = given.logprobs.detach().exp() - given.anchor.exp()
    dropped = ((advantages > 0) & (change > config.clip_high)) | (
        (advantages < 0) & (-change > config.clip_low)
    )
    loss = -advantages * given.log_ratio.exp()
    return torch.where(dropped, 0, loss), dropped


def reinforce(given: Scored, config: Objective) -> tuple[Tensor, Tensor]:
    """``-A logp``, for one optimizer step a batch: no ratio, no clip.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -given.advantages * given.logprobs, torch.zeros_like(given.anchor, dtype=torch.bool)


TERMS: dict[str, Term] = {term.__name__: term for term in (ppo, cispo, sapo, gmpo, dppo, reinforce)}


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """[T] bool, whether clipping stops the gradient."""
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
