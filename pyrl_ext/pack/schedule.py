"""Which samples run together, and on which rank: the checks in front of `pack_samples`.

The plan's forecast packs with the same function (`plan/forecast/packing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyrl_ext.plan.forecast.packing import Schedule, pack_samples

__all__ = ["Schedule", "balance_ratio", "plan_microbatches"]


def plan_microbatches(
    seqlens: Sequence[int], dp_size: int, tokens_per_microbatch: int, align: int = 1
) -> Schedule:
    """Samples of every microbatch of every data-parallel rank, deterministic and balanced.

    `pack_samples` documents the algorithm.

    Args:
        seqlens: rows of each sample [tokens].
        dp_size: data-parallel ranks.
        tokens_per_microbatch: most padded rows of a microbatch of one rank [tokens].
        align: every sample is padded to a multiple of this [tokens].

    Returns:
        [dp_size][microbatches] sample ids, ascending. A microbatch is empty only where there are
        fewer samples than dp_size * microbatches.

    Raises:
        ValueError: a sample does not fit into a microbatch alone, or a size is not positive.
    """
    _check_sizes(seqlens, dp_size, tokens_per_microbatch, align)
    return pack_samples(_padded(seqlens, align).tolist(), dp_size, tokens_per_microbatch)


def balance_ratio(schedule: Schedule, seqlens: Sequence[int], align: int = 1) -> float:
    """Sum over microbatches of the fullest rank's rows, over all rows / ranks; 1 is perfect.

    Args:
        schedule: [dp_size][microbatches] sample ids.
        seqlens: rows of each sample [tokens].
        align: padding multiple of a sample [tokens].
    """
    loads = _padded(seqlens, align)
    table = np.array([[loads[list(ids)].sum() for ids in rank] for rank in schedule])
    return float(table.max(axis=0).sum() * len(schedule) / table.sum())


def _check_sizes(seqlens: Sequence[int], dp_size: int, limit: int, align: int) -> None:
    sizes = {"dp_size": dp_size, "tokens_per_microbatch": limit, "align": align}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"plan_microbatches: {name} is {value}, expected at least 1")
    if not len(seqlens):
        raise ValueError("plan_microbatches: 0 samples, expected at least 1")
    for sample, n in enumerate(seqlens):
        padded = -(-n // align) * align
        if n < 1:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows, expected at least 1"
            )
        if padded > limit:
            raise ValueError(
                f"plan_microbatches: sample {sample} has {n} rows ({padded} padded to a multiple "
                f"of {align}), expected at most tokens_per_microbatch = {limit}. Raise "
                "batching.tokens_per_microbatch or shorten the responses"
            )


def _padded(seqlens: Sequence[int], align: int) -> np.ndarray:
    """[S] int64, each length rounded up to a multiple of ``align``."""
    return -(-np.asarray(seqlens, dtype=np.int64) // align) * align
