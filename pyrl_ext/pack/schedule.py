"""Which samples run together, and on which rank: rounds of microbatches.

The plan's forecast packs with the same function (`plan/forecast/packing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyrl_ext.plan.forecast.packing import pack_samples

__all__ = ["Round", "Schedule", "plan_microbatches"]


class Round(NamedTuple):
    """One microbatch on every data-parallel rank.

    Args:
        cp_size: context-parallel ranks that share the rows of a microbatch.
        bins: [dp_size] sample ids of each data-parallel rank's microbatch, ascending.
    """

    cp_size: int
    bins: tuple[tuple[int, ...], ...]


Schedule = Sequence[Round]


def plan_microbatches(
    seqlens: Sequence[int],
    dp_size: int,
    tokens_per_microbatch: int,
    align: int = 1,
    cp_size: int = 1,
) -> tuple[Round, ...]:
    """Samples of every microbatch of every data-parallel rank, deterministic and balanced.

    `pack_samples` documents the algorithm.

    Args:
        seqlens: rows of each sample [tokens].
        dp_size: data-parallel ranks.
        tokens_per_microbatch: most padded rows of a microbatch on one context-parallel rank
            [tokens].
        align: every sample is padded to a multiple of this [tokens].
        cp_size: context-parallel ranks that share the rows of a microbatch.

    Returns:
        One `Round` a microbatch. A bin is empty only if there are fewer samples than bins.

    Raises:
        ValueError: a sample does not fit into a microbatch alone, or a size is not positive.
    """
    limit = tokens_per_microbatch * cp_size
    _check_sizes(seqlens, dp_size, limit, align)
    table = pack_samples([_padded(n, align) for n in seqlens], dp_size, limit)
    return tuple(Round(cp_size, bins) for bins in zip(*table, strict=True))


def _check_sizes(seqlens: Sequence[int], dp_size: int, limit: int, align: int) -> None:
    sizes = {"dp_size": dp_size, "tokens_per_microbatch": limit, "align": align}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"plan_microbatches: {name} is {value}, expected at least 1")
    if not len(seqlens):
        raise ValueError("plan_microbatches: 0 samples, expected at least 1")
    for sample, n in enumerate(seqlens):
        padded = _padded(n, align)
        if n < 1:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows, expected at least 1"
            )
        if padded > limit:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows ({padded} padded to a multiple "
                f"of {align}), expected at most tokens_per_microbatch x cp = {limit}. Raise "
                "batching.tokens_per_microbatch or shorten the responses"
            )


def _padded(length: int, align: int) -> int:
    return -(-length // align) * align
