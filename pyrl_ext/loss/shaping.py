"""Shaping of rewards by the length of responses."""

from __future__ import annotations

import numpy as np


def overlong(lengths: np.ndarray, longest: int, buffer: int, penalty: float) -> np.ndarray:
    """``min(-(n - (longest - buffer)) / buffer * penalty, 0)``: a response loses reward in the last
    ``buffer`` tokens of its room.

    Args:
        lengths: [S] tokens n of each response.
        longest: tokens that a response may have.
        buffer:  0: nothing is lost.
        penalty: lost by a response of ``longest`` tokens [reward].

    Returns: [S] float64, at most 0; to be added to the rewards.
    Source: DAPO, https://arxiv.org/abs/2503.14476.
    """
    if not buffer:
        return np.zeros(len(lengths))
    over = lengths.astype(np.float64) - (longest - buffer)
    return np.minimum(-over / buffer * penalty, 0.0)
