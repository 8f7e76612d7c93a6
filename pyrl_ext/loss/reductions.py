"""Reductions: how the losses of tokens become one number, as a weight on each sample's tokens.

The trainer divides the weighted sum over a minibatch by its number N of loss tokens. All counts are
those of the whole minibatch, over all ranks, known before the pass. A sequence is a trajectory,
whatever samples it was cut into. One without loss tokens counts nowhere; a token that a correction
rejects still counts.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def reduction_weights(
    reduction: str, tokens: Tensor, groups: Tensor, constant: float | None = None
) -> Tensor:
    """[J] float64, the weight of each loss token of a trajectory.

    ============  ============================================================
    reduction     weight of a token of trajectory i, in group g
    ============  ============================================================
    token         1
    sequence      N / (J n_i): the mean over trajectories of their token means
    sequence_sum  N / (J c): the mean over trajectories of their sums over c
    prompt        N / (P n_g): the mean over prompts of their token means
    ============  ============================================================

    Args:
        tokens: [J] loss tokens n_i of each trajectory of the minibatch.
        groups: [J] int64.
        constant: c of sequence_sum [tokens].

    Raises: ValueError for a name that is none of these, or sequence_sum without a constant.
    """
    n = tokens.double()
    total = n.sum()
    counted = (n > 0).double()
    group = numbered(groups)
    per_group = n.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(0, group, n)
    match reduction:
        case "token":
            weights = torch.ones_like(n)
        case "sequence":
            weights = total / (counted.sum() * n).clamp(min=1)
        case "sequence_sum" if constant:
            weights = (total / (counted.sum() * constant).clamp(min=1)).expand(len(n))
        case "prompt":
            weights = total / ((per_group > 0).sum() * per_group[group]).clamp(min=1)
        case _:
            raise ValueError(
                f"reduction_weights: {reduction} with constant {constant}, expected token, "
                "sequence, prompt, or sequence_sum with one"
            )
    return weights * counted


def numbered(ids: Tensor) -> Tensor:
    """[S] int64, 0 .. G - 1: equal for equal ``ids``."""
    inverse = ids.unique(return_inverse=True)[1]  # pyright: ignore
    return cast(Tensor, inverse)
