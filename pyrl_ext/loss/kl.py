"""The KL from the policy to a reference: a value to show, and a separate gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyrl_ext.loss.inputs import clamp_log_ratio
from pyrl_ext.plan.schema.objective import Objective

# Estimates of KL(policy || reference) at a sampled token, of k = logp - ref.
# Source: http://joschu.net/blog/kl-approx.html
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda k: k,
    "k2": lambda k: k.square() / 2,
    "k3": lambda k: torch.expm1(-k) + k,
}


def kl_terms(config: Objective, k: Tensor, log_ratio: Tensor) -> Tensor:
    """[T] the KL term of each token, whose value is ``w v(k)``.

    With v' the derivative of v, r the ratio and w = r, or 1 for weight none, its gradient by the
    current log-prob is

    ==========  ==============  ==========  ===================
    gradient    weight: none    detached    ratio
    ==========  ==============  ==========  ===================
    direct      v'              r v'        r (v + v')
    reverse     k               r k         r k
    ==========  ==============  ==========  ===================

    ``reverse`` is the gradient of the reverse KL, E[k], under the policy (r: the samples are the
    anchor's), whichever value is shown. ``direct`` with k1 has mean 0 on-policy, so it trains
    nothing; with k2 it is ``reverse``; with k3 it descends the forward KL.

    Args:
        config: of which ``kl``, ``kl_gradient`` and ``kl_weight`` are read.
        k: [T] logp - ref, with the gradient of logp.
        log_ratio: [T] logp - anchor of each token, with the gradient of logp.

    Source: https://arxiv.org/abs/2506.09477.
    """
    value = VALUES[config.kl](k)
    weight = config.kl_weight
    ratio = torch.ones_like(k) if weight == "none" else clamp_log_ratio(log_ratio)[0].exp()
    if config.kl_gradient == "direct":
        return (ratio.detach() if weight == "detached" else ratio) * value
    slope = (ratio * k).detach()
    return (ratio * value).detach() + slope * (k - k.detach())
