"""Expected lengths of a step's samples."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from pyrl_ext.plan.plan import Plan


class SampleLength(NamedTuple):
    """One sequence: tokens of its prompt and of its response."""

    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """Rows that the trainer computes: the last token of a sample is never an input."""
        return self.prompt + self.response - 1


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


def scored_share(plan: Plan) -> float:
    """Rows whose target is a response token, over all rows of a step."""
    samples = step_samples(plan)
    return sum(s.response for s in samples) / sum(s.rows for s in samples)


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
