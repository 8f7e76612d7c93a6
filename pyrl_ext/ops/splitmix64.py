"""The mixing function of splitmix64: 64-bit integers that look random, the same on every device."""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, the step between two inputs


def splitmix64(x: Tensor) -> Tensor:
    """splitmix64's output function on int64: products wrap, a mask makes the shifts logical.

    Args:
        x: any shape, int64

    Returns:
        the same shape, int64
    """
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))
