"""The microbatches that a step's samples are packed into."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pyrl_ext.plan.forecast.flops import sample_rates
from pyrl_ext.plan.forecast.workload import SampleLength, step_samples
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.alignment import alignment, padded
from pyrl_ext.schedule.cp_sizes import cp_sizes
from pyrl_ext.schedule.packing import pack_samples


class Bin(NamedTuple):
    """Totals of the samples that a data-parallel rank computes, in one microbatch or several."""

    rows: int
    """Padded rows."""
    pairs: int
    """Causal pairs of a query and a key: L (L + 1) / 2 for every sample of L rows."""
    scored: int
    """Rows whose target is a response token."""
    microbatches: int = 1


class Round(NamedTuple):
    """One microbatch on every data-parallel rank; the ranks wait for each other."""

    cp: int
    """Ranks that share each sequence."""
    bins: tuple[Bin, ...]


def step_rounds(plan: Plan) -> tuple[Round, ...]:
    """The rounds of a log-prob pass over all samples: those of the minibatches in turn."""
    return tuple(turn for part in update_rounds(plan) for turn in part)


def update_rounds(plan: Plan) -> tuple[tuple[Round, ...], ...]:
    """The rounds of every minibatch, in one pass over a step's samples."""
    samples = step_samples(plan)
    count = plan.samples_per_minibatch
    parallel = plan.parallel
    limit = plan.batching.tokens_per_microbatch
    sizes = (parallel.dp, parallel.tp, parallel.cp, parallel.dynamic_cp)
    rates = sample_rates(plan)
    return tuple(
        _rounds(samples[first : first + count], *sizes, limit, plan.tile_rows, rates)
        for first in range(0, plan.samples, count)
    )


@lru_cache(maxsize=512)
def _rounds(
    samples: tuple[SampleLength, ...],
    dp: int,
    tp: int,
    cp: int,
    dynamic: int | None,
    limit: int,
    tile_rows: int,
    rates: tuple[float, float],
) -> tuple[Round, ...]:
    """Rounds of `samples`. Under dynamic context parallelism a sample runs on the smallest group
    in which a rank's part is within the limit, together with samples of that size."""
    units = {cp: alignment(tp, cp, tile_rows)}
    if dynamic is not None:
        units = {size: alignment(tp, size, tile_rows) for size in cp_sizes(dp * cp, cp, dynamic)}
    classes: dict[int, list[SampleLength]] = {}
    for sample in samples:
        fitting = (s for s, unit in units.items() if padded(sample.rows, unit) <= limit * s)
        classes.setdefault(next(fitting, max(units)), []).append(sample)
    return tuple(
        turn
        for size, group in sorted(classes.items())
        for turn in _pack(group, size, dp * cp // size, limit * size, units[size], rates)
    )


def _pack(
    samples: Sequence[SampleLength],
    cp: int,
    dp: int,
    limit: int,
    align: int,
    rates: tuple[float, float],
) -> list[Round]:
    loads = [padded(sample.rows, align) for sample in samples]
    work = [rates[0] * n + rates[1] * n * n for n in loads]
    # a sample beyond the limit runs alone, so that a plan that breaks this rule can be priced
    table = pack_samples(loads, dp, max(limit, *loads), work)

    def bin_of(ids: Sequence[int]) -> Bin:
        pairs = sum(samples[i].rows * (samples[i].rows + 1) // 2 for i in ids)
        return Bin(sum(loads[i] for i in ids), pairs, sum(samples[i].response for i in ids))

    return [Round(cp, tuple(map(bin_of, turn))) for turn in zip(*table, strict=True)]
