"""Expected lengths of a step's samples, and the microbatches they are packed into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from pyrl_ext.plan.forecast.record_lengths import record_lengths
from pyrl_ext.plan.plan import Plan
from pyrl_ext.schedule.alignment import alignment
from pyrl_ext.schedule.cp_sizes import cp_sizes
from pyrl_ext.schedule.packing import pack_samples


class Sample(NamedTuple):
    """One sequence: tokens of its prompt and of its response."""

    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """Rows that the trainer computes: the last token of a sample is never an input."""
        return self.prompt + self.response - 1


class Bin(NamedTuple):
    """Totals of the samples that one data-parallel rank computes in one microbatch."""

    rows: int
    """Padded rows."""
    pairs: int
    """Causal pairs of a query and a key: L (L + 1) / 2 for every sample of L rows."""
    scored: int
    """Rows whose target is a response token."""


class Round(NamedTuple):
    """One microbatch on every data-parallel rank; the ranks wait for each other."""

    cp: int
    """Ranks that share each sequence."""
    bins: tuple[Bin, ...]


def step_samples(plan: Plan) -> tuple[Sample, ...]:
    """All samples of a step, prompt by prompt: evenly spaced quantiles of lognormals with the means
    and spread of `plan.estimate`, cut at the plan's maxima, shuffled deterministically. Without
    rollouts, quantiles of the records' lengths where these are known (`lengths_of`)."""
    estimate = plan.estimate
    batching = plan.batching
    if records := _records(plan):
        return _of_records(records, batching.samples or 1, plan.data.max_tokens)
    if plan.has_rollouts:
        prompt = plan.data.max_prompt_tokens
        longest = prompt, plan.longest + 1 - prompt  # answers and observations
    else:  # half of a record is given, half is trained on
        longest = (plan.data.max_tokens // 2, -(-plan.data.max_tokens // 2))
    means = estimate.prompt_tokens, estimate.response_tokens
    prompt, response = (
        (mean or max(1, most / 2), estimate.spread, most)
        for mean, most in zip(means, longest, strict=True)
    )
    return _samples(
        batching.samples or batching.prompts, batching.samples_per_prompt or 1, prompt, response
    )


def lengths_of(plan: Plan) -> str:
    """The source of the lengths of `step_samples`."""
    if records := _records(plan):
        return f"as the first {len(records):,} records of data.path"
    return "estimate" if plan.has_rollouts else "estimate; data.path is not looked at"


def _records(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Lengths from the file of a run without rollouts, unless `estimate` has some."""
    given = plan.estimate.prompt_tokens or plan.estimate.response_tokens
    if given or plan.has_rollouts or plan.records_path is None:
        return ()
    return record_lengths(plan.records_path)


@lru_cache(maxsize=8)
def _of_records(records: tuple[tuple[int, int], ...], count: int, most: int) -> tuple[Sample, ...]:
    """`count` records at the midpoints of equal shares by length, cut at `most` tokens."""
    rising = sorted(records, key=sum)
    chosen = [rising[(2 * i + 1) * len(rising) // (2 * count)] for i in _mixed(count)]
    cut = [(min(prompt, most - 1), response) for prompt, response in chosen]
    return tuple(Sample(prompt, min(response, most - prompt)) for prompt, response in cut)


Lognormal = tuple[float, float, int]  # mean, standard deviation of the logarithm, maximum


@lru_cache(maxsize=8)
def _samples(prompts: int, each: int, prompt: Lognormal, response: Lognormal) -> tuple[Sample, ...]:
    rising = quantiles(prompts, *prompt), quantiles(prompts * each, *response)
    asked, answered = ([lengths[i] for i in _mixed(len(lengths))] for lengths in rising)
    return tuple(Sample(asked[i // each], length) for i, length in enumerate(answered))


def quantiles(count: int, mean: float, spread: float, most: int) -> list[int]:
    """`count` rising lengths of 1 to `most` tokens: quantiles of a lognormal at the midpoints of
    equal shares."""
    middle = math.log(mean) - spread**2 / 2
    normal = NormalDist()
    shares = ((i + 0.5) / count for i in range(count))
    lengths = (math.exp(middle + spread * normal.inv_cdf(share)) for share in shares)
    return [min(most, max(1, round(length))) for length in lengths]


def _mixed(count: int) -> list[int]:
    """0 to count - 1 in golden-section steps, so that any contiguous part is spread evenly."""
    step = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, count) != 1:
        step += 1
    return [i * step % count for i in range(count)]


def step_rounds(plan: Plan) -> tuple[Round, ...]:
    """The rounds of a log-prob pass over all samples: those of the minibatches in turn."""
    return tuple(each for part in update_rounds(plan) for each in part)


def update_rounds(plan: Plan) -> tuple[tuple[Round, ...], ...]:
    """The rounds of every minibatch."""
    samples = step_samples(plan)
    each = plan.samples_per_minibatch
    parts = (samples[first : first + each] for first in range(0, plan.samples, each))
    return tuple(_rounds_of(plan, part) for part in parts)


def even_rounds(plan: Plan, parts: int) -> tuple[Round, ...]:
    """Approximate rounds of one of `parts` equal minibatches: the fewest possible, all equal."""
    parallel = plan.parallel
    samples = step_samples(plan)
    rows, pairs, scored = _totals(samples)
    ranks = parts * parallel.dp
    number = -(-rows // (ranks * parallel.cp * plan.batching.tokens_per_microbatch))
    each = Bin(*(total // (ranks * number) for total in (rows, pairs, scored)))
    return (Round(parallel.cp, (each,)),) * number


@lru_cache(maxsize=8)
def _totals(samples: tuple[Sample, ...]) -> tuple[int, int, int]:
    whole = _bin(samples, sum(sample.rows for sample in samples))
    return whole.rows, whole.pairs, whole.scored


def _rounds_of(plan: Plan, samples: tuple[Sample, ...]) -> tuple[Round, ...]:
    parallel = plan.parallel
    limit = plan.batching.tokens_per_microbatch
    sizes = parallel.dp, parallel.tp, parallel.cp, parallel.dynamic_cp
    return _rounds(samples, *sizes, limit, plan.tile_rows)


@lru_cache(maxsize=512)
def _rounds(
    samples: tuple[Sample, ...],
    dp: int,
    tp: int,
    cp: int,
    dynamic: int | None,
    limit: int,
    tile_rows: int,
) -> tuple[Round, ...]:
    """Rounds of `samples`. Under dynamic context parallelism a sample runs on the smallest group
    in which a rank's part is within the limit, together with samples of that size."""
    if dynamic is None:
        return tuple(_pack(samples, cp, dp, limit * cp, alignment(tp, cp, tile_rows)))
    classes: dict[int, list[Sample]] = {}
    units = {size: alignment(tp, size, tile_rows) for size in cp_sizes(dp * cp, cp, dynamic)}
    for sample in samples:
        fitting = (s for s, unit in units.items() if _padded(sample.rows, unit) <= limit * s)
        classes.setdefault(next(fitting, max(units)), []).append(sample)
    return tuple(
        each
        for size, held in sorted(classes.items())
        for each in _pack(held, size, dp * cp // size, limit * size, alignment(tp, size, tile_rows))
    )


def _pack(samples: Sequence[Sample], cp: int, dp: int, limit: int, align: int) -> list[Round]:
    loads = [_padded(sample.rows, align) for sample in samples]
    # a sample beyond the limit runs alone, so that a plan that breaks this rule can be priced
    table = pack_samples(loads, dp, max(limit, *loads))
    return [
        Round(
            cp, tuple(_bin([samples[i] for i in ids], sum(loads[i] for i in ids)) for ids in turn)
        )
        for turn in zip(*table, strict=True)
    ]


def _bin(samples: Sequence[Sample], rows: int) -> Bin:
    pairs = sum(sample.rows * (sample.rows + 1) // 2 for sample in samples)
    return Bin(rows, pairs, sum(sample.response for sample in samples))


def _padded(rows: int, align: int) -> int:
    return -(-rows // align) * align
