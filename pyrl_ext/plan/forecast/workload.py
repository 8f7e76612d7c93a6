"""Expected lengths of a step's samples, and the microbatches they are packed into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.alignment import alignment
from pyrl_ext.schedule.cp_sizes import cp_sizes
from pyrl_ext.schedule.packing import pack_samples


class SampleLength(NamedTuple):
    """One sequence: tokens of its prompt and of its response."""

    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """Rows that the trainer computes: the last token of a sample is never an input."""
        return self.prompt + self.response - 1


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


def step_samples(plan: Plan) -> tuple[SampleLength, ...]:
    """All samples of a step, prompt by prompt: evenly spaced quantiles of lognormals with the means
    and spread of `plan.estimate`, cut at the plan's maxima, shuffled deterministically."""
    estimate = plan.estimate
    batching = plan.batching
    if plan.has_rollouts:
        most_prompt = plan.data.max_prompt_tokens
        most_response = plan.longest + 1 - most_prompt  # answers and observations
    else:  # half of a record is given, half is trained on
        most_prompt = plan.data.max_tokens // 2
        most_response = -(-plan.data.max_tokens // 2)
    return _samples(
        batching.samples or batching.prompts,
        batching.samples_per_prompt or 1,
        (estimate.prompt_tokens or max(1, most_prompt / 2), estimate.spread, most_prompt),
        (estimate.response_tokens or max(1, most_response / 2), estimate.spread, most_response),
    )


Lognormal = tuple[float, float, int]  # mean, standard deviation of the logarithm, maximum


@lru_cache(maxsize=8)
def _samples(
    prompts: int, each: int, prompt: Lognormal, response: Lognormal
) -> tuple[SampleLength, ...]:
    asked = _mixed(quantiles(prompts, *prompt))
    answered = _mixed(quantiles(prompts * each, *response))
    return tuple(SampleLength(asked[i // each], length) for i, length in enumerate(answered))


def quantiles(count: int, mean: float, spread: float, most: int) -> list[int]:
    """`count` rising lengths of 1 to `most` tokens: quantiles of a lognormal at the midpoints of
    equal shares."""
    middle = math.log(mean) - spread**2 / 2
    normal = NormalDist()
    shares = ((i + 0.5) / count for i in range(count))
    lengths = (math.exp(middle + spread * normal.inv_cdf(share)) for share in shares)
    return [min(most, max(1, round(length))) for length in lengths]


def _mixed(lengths: list[int]) -> list[int]:
    """`lengths` in golden-section steps, so that any contiguous part is spread evenly."""
    count = len(lengths)
    step = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, count) != 1:
        step += 1
    return [lengths[i * step % count] for i in range(count)]


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
    return tuple(
        _rounds(samples[first : first + count], *sizes, limit, plan.tile_rows)
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
) -> tuple[Round, ...]:
    """Rounds of `samples`. Under dynamic context parallelism a sample runs on the smallest group
    in which a rank's part is within the limit, together with samples of that size."""
    units = {cp: alignment(tp, cp, tile_rows)}
    if dynamic is not None:
        units = {size: alignment(tp, size, tile_rows) for size in cp_sizes(dp * cp, cp, dynamic)}
    classes: dict[int, list[SampleLength]] = {}
    for sample in samples:
        fitting = (s for s, unit in units.items() if _padded(sample.rows, unit) <= limit * s)
        classes.setdefault(next(fitting, max(units)), []).append(sample)
    return tuple(
        turn
        for size, group in sorted(classes.items())
        for turn in _pack(group, size, dp * cp // size, limit * size, units[size])
    )


def _pack(samples: Sequence[SampleLength], cp: int, dp: int, limit: int, align: int) -> list[Round]:
    loads = [_padded(sample.rows, align) for sample in samples]
    # a sample beyond the limit runs alone, so that a plan that breaks this rule can be priced
    table = pack_samples(loads, dp, max(limit, *loads))

    def bin_of(ids: Sequence[int]) -> Bin:
        pairs = sum(samples[i].rows * (samples[i].rows + 1) // 2 for i in ids)
        return Bin(sum(loads[i] for i in ids), pairs, sum(samples[i].response for i in ids))

    return [Round(cp, tuple(map(bin_of, turn))) for turn in zip(*table, strict=True)]


def _padded(rows: int, align: int) -> int:
    return -(-rows // align) * align
