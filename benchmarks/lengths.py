"""Sequence lengths that the cases share: drawn from a fixed seed."""

import numpy as np


def uniform(count: int, longest: int) -> tuple[int, ...]:
    """``count`` lengths from ``longest / 16`` to ``longest``."""
    draw = np.random.default_rng(0).integers(longest // 16, longest, count, endpoint=True)
    return tuple(draw.tolist())


def lognormal(count: int, longest: int, total: int) -> tuple[int, ...]:
    """``count`` lengths with a long tail, cut off at ``longest``, which sum to about ``total``."""
    tail = np.exp(np.random.default_rng(0).normal(size=count))

    def drawn(scale: float) -> np.ndarray:
        return np.clip(np.round(scale * tail), 1, longest).astype(int)

    low = 0.0
    high = float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if drawn(scale).sum() < total else (low, scale)
    return tuple(drawn(high).tolist())
