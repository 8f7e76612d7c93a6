"""Ratios: the log of each token's probability ratio, or of its sequence's."""

from __future__ import annotations

from torch import Tensor

from pyrl_ext.loss.inputs import Sequences


def log_ratios(kind: str, d: Tensor, sequences: Sequences | None) -> Tensor:
    """[T] log-ratio of each token, before it is clamped.

    ==============  ==================================================
    kind            log-ratio
    ==============  ==================================================
    token           d
    sequence        mean of d over the sequence's loss tokens
    sequence_token  that mean without its gradient, with the one of d
    ==============  ==================================================

    Args:
        d: [T] logp - anchor, 0 outside the loss mask.

    Source: GSPO and GSPO-token, https://arxiv.org/abs/2507.18071.
    """
    if kind == "token":
        return d
    assert sequences is not None
    if kind == "sequence":
        return sequences.mean(d)
    own = d.detach()
    return sequences.mean(own) + (d - own)
