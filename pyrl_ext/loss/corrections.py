"""Corrections for the difference between engine and trainer, as weights without a gradient.

Let e = log p_old - log p_rollout at each loss token; a sequence is a trajectory, whatever samples
it was cut into. In this order, each multiplies the weight:

1. truncated weight: exp(e) of the token, or exp(sum of e) of its sequence, clamped to
   [tis_floor, tis_cap];
2. mask_ratio: 0 where exp(e) is outside the bounds (IcePop);
3. sequence_bounds: 0 in sequences whose exp(mean e) (geometric) or exp(sum e) (product) is outside;
4. veto: 0 in sequences with any exp(e) below it.

They need no current log-probs, so they are made once for a batch, on the host; those of tokens
where old log-probs come from the update (`Plan.scores_in_update`), in it. Rejected tokens stay in
every denominator, and are counted by what rejected them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyrl_ext.loss.inputs import LOG_RATIO_LIMIT, masked
from pyrl_ext.plan.schema.objective import Objective

Sums = Callable[[Tensor], Tensor]  # [S, k] of this rank's rows -> over the rows of all ranks


def correct(
    config: Objective,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequences: Tensor | None = None,
    count: int = 0,
    over_ranks: Sums = lambda sums: sums,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight of every row's policy term, and what was rejected.

    Args:
        old_logprobs, rollout_logprobs: [N] float32 [nats].
        loss_mask: [N] bool.
        sequences: [N] int64, sequence of each row, below ``count``; read if the config corrects
            by whole sequences (`Objective.corrects_sequences`).
        over_ranks: adds up [count, 3] float64 over the ranks that share sequences; called if
            ``sequences`` is read.

    Returns:
        [N] float64, 0 outside the mask; and by metric: the sum of the truncated weights
        ("policy/tis_mean") and numbers of rejected tokens of this rank, float64.

    Source: truncated weights, https://fengyao.notion.site/off-policy-rl; IcePop,
    https://ringtech.notion.site/icepop; sequence masks and veto,
    https://richardli.xyz/rl-collapse.
    """
    e = masked(old_logprobs - rollout_logprobs, loss_mask).double()
    e = e.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_weight = e
    causes = {"token": _outside(e, config.mask_ratio)}
    if config.corrects_sequences:
        if sequences is None:
            raise ValueError("correct: sequences is None, expected those that the config asks for")
        floor = -math.inf if config.veto is None else math.log(config.veto)
        columns = torch.stack([e, loss_mask.double(), ((e < floor) & loss_mask).double()], -1)
        table = over_ranks(columns.new_zeros(count, 3).index_add(0, sequences, columns))
        totals, tokens, vetoed = table[sequences].unbind(-1)
        if config.tis == "sequence":
            log_weight = totals
        mean = totals / tokens.clamp(min=1)
        of_sequence = mean if config.mask_sequence == "geometric" else totals
        causes["sequence"] = _outside(of_sequence, config.sequence_bounds)
        causes["veto"] = None if config.veto is None else vetoed > 0
    weights = loss_mask.double()
    found = dict[str, Tensor]()
    if config.tis_cap is not None:
        truncated = log_weight.clamp(max=LOG_RATIO_LIMIT).exp()
        weights = weights * truncated.clamp(config.tis_floor or 0.0, config.tis_cap)
        found["policy/tis_mean"] = weights.sum()
    left = loss_mask
    for cause, rejected in causes.items():
        if rejected is not None:
            found[f"policy/rejected/{cause}"] = (left & rejected).sum().double()
            left = left & ~rejected
    return torch.where(left, weights, 0), found


def _outside(log_ratio: Tensor, bounds: tuple[float, float] | None) -> Tensor | None:
    """[N] bool, whether exp(log_ratio) is outside ``bounds`` (inclusive); None for None."""
    if bounds is None:
        return None
    ratio = log_ratio.exp()
    return (ratio < bounds[0]) | (ratio > bounds[1])
