"""How far the trainer's log-probs are from the rollout engine's for the same tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Distances over d = old - rollout and r = exp(d), as defined in the glossary.

    Nothing is clamped and no NaN is replaced: one NaN under the mask makes every distance NaN,
    and is counted in ``mismatch/nonfinite``. Arithmetic is in float64, since d is often 1e-4 and
    k3 is quadratic in it.

    Args:
        old_logprobs: [T] float, of the target in the trainer's policy before the update [nats].
        rollout_logprobs: [T] float, in the engine's distribution [nats].
        mask: [T] bool, the tokens to compare; the others may hold anything.

    Returns:
        ``mismatch/...`` -> value.

    Syncs: yes, it returns Python numbers.

    Raises:
        ValueError: no token under the mask.
    """
    old, rollout = old_logprobs[mask].double(), rollout_logprobs[mask].double()
    n = old.numel()
    if not n:
        raise ValueError("mismatch: 0 tokens under the mask, expected at least 1")
    d = old - rollout
    size = d.abs()
    ordinary = torch.where(d.isnan().any(), math.nan, 1.0)  # comparisons and ranks swallow NaN
    scaled = (d - d.max()).exp()  # the effective sample size does not depend on a factor
    values = {
        "k3": (d.expm1() - d).mean(),
        "abs_mean": size.mean(),
        "p99": size.kthvalue(math.ceil(0.99 * n)).values * ordinary,
        "max": size.max(),
        "prob_abs_mean": (old.exp() - rollout.exp()).abs().mean(),
        "f2": (size > math.log(2)).double().mean() * ordinary,
        "f5": (size > math.log(5)).double().mean() * ordinary,
        "ess": scaled.sum().square() / (n * scaled.square().sum()),
        "chi2": (2 * d).expm1().mean(),
        "ppl_ratio": (-d.mean()).exp(),
        "nonfinite": (~d.isfinite()).sum().double(),
    }
    numbers = torch.stack(list(values.values())).tolist()
    return {f"mismatch/{name}": number for name, number in zip(values, numbers, strict=True)}
