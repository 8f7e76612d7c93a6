"""Results of an evaluation against loops over samples, and pass@k against all draws."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.metrics.glossary import check_names
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.rollout.evaluation import Estimate, Evaluation, pass_at_k
from pyrl_ext.samples import Sampling
from tests.helpers.samples import make_sample


@given(samples=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_response(samples, data):
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    draws = list(combinations([i < correct for i in range(samples)], k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_rejects_impossible_numbers(samples, correct, k):
    with pytest.raises(ValueError, match=f"{correct} of {samples} correct, k {k}, expected 0 <="):
        pass_at_k(samples, correct, k)


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    missing=st.integers(0, 3),
    threshold=st.floats(0, 1),
)
def test_evaluation_equals_a_loop_over_samples(counts, missing, threshold):
    samples = [
        make_sample(10 + prompt, index, 3, 1 + (prompt + index) % 4)
        for prompt, count in enumerate(counts)
        for index in range(count)
    ]
    asked = len(counts) + missing
    sampling = Sampling(8, samples_per_prompt=6, temperature=0.5)
    ks = (1, 3, 6)
    found = Evaluation.of(BatchIndex.of(samples), asked, sampling, ks, threshold)

    rewards = defaultdict(list)
    for sample in samples:
        rewards[sample.prompt_id].append(sample.reward)
    means = [sum(own) / len(own) for own in rewards.values()]
    assert found.reward.mean == pytest.approx(sum(means) / len(means))
    for k in ks:
        shares = []
        for own in rewards.values():
            if len(own) >= k:
                draws = list(combinations(own, k))
                shares.append(sum(max(draw) >= threshold for draw in draws) / len(draws))
        if shares:
            assert found.passes[k].mean == pytest.approx(sum(shares) / len(shares))
        else:
            assert math.isnan(found.passes[k].mean)
    lengths = [int(s.loss_mask.sum()) for s in samples]
    assert found.length == pytest.approx(sum(lengths) / len(samples))
    cut = [s.finish_reason == "length" for s in samples]
    assert found.truncated == pytest.approx(sum(cut) / len(samples))
    assert (found.prompts, found.samples, found.temperature) == (len(counts), 6, 0.5)
    assert found.dropped == pytest.approx(missing / asked)
    for name in ("held_out", "aime"):
        metrics = found.metrics(name)
        check_names(metrics)
        assert all(map(math.isfinite, metrics.values()))
    json.dumps(found.to_json(), allow_nan=False)


def test_a_reward_at_the_threshold_passes():
    samples = [
        replace(make_sample(10, n, 3, 2), reward=reward) for n, reward in enumerate((0.5, 0.25))
    ]
    found = Evaluation.of(BatchIndex.of(samples), 1, Sampling(8), (1, 2), 0.5)
    assert (found.passes[1].mean, found.passes[2].mean) == (0.5, 1.0)


def test_standard_error_is_that_of_the_mean_over_prompts():
    values = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = Estimate.of(values.tolist())
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.error == pytest.approx(float(values.std()) / math.sqrt(50))
    assert math.isnan(Estimate.of([0.5]).error) and math.isnan(Estimate.of([]).mean)


def test_an_evaluation_without_responses_has_no_numbers_but_their_share():
    found = Evaluation.of(BatchIndex.of([]), 4, Sampling(8), (1,))
    assert found.metrics("held_out") == {"eval_dropped": 1.0}
    assert found.metrics("aime") == {"eval/aime/dropped": 1.0}
