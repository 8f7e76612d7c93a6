"""Distances between trainer and engine, against plain Python loops."""

import math
import random

import pytest
import torch

from pyrl_ext.metrics.mismatch import mismatch


def mismatch_loop(old: list[float], rollout: list[float]) -> dict[str, float]:
    d = [a - b for a, b in zip(old, rollout, strict=True)]
    r = [math.exp(x) for x in d]
    n = len(d)
    size = sorted(abs(x) for x in d)
    gaps = [abs(math.exp(a) - math.exp(b)) for a, b in zip(old, rollout, strict=True)]
    return {
        "mismatch/k3": sum(x - 1 - y for x, y in zip(r, d, strict=True)) / n,
        "mismatch/abs_mean": sum(size) / n,
        "mismatch/p99": next(x for k, x in enumerate(size, 1) if k >= 0.99 * n),
        "mismatch/max": size[-1],
        "mismatch/prob_abs_mean": sum(gaps) / n,
        "mismatch/f2": sum(max(x, 1 / x) > 2 for x in r) / n,
        "mismatch/f5": sum(max(x, 1 / x) > 5 for x in r) / n,
        "mismatch/ess": sum(r) ** 2 / (n * sum(x * x for x in r)),
        "mismatch/chi2": sum(x * x for x in r) / n - 1,
        "mismatch/ppl_ratio": math.exp(-sum(old) / n) / math.exp(-sum(rollout) / n),
        "mismatch/nonfinite": 0,
    }


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 1000])
@pytest.mark.parametrize("scale", [0.01, 1.5])
def test_mismatch_equals_the_loop(n, scale):
    rng = random.Random(n)
    rollout = [-rng.expovariate(1.0) for _ in range(n)]
    old = [x + rng.gauss(0, scale) for x in rollout]
    mask = torch.tensor([True, False] * n)
    junk = torch.full((n,), math.nan).double()
    got = mismatch(
        torch.stack([torch.tensor(old).double(), junk], 1).flatten(),
        torch.stack([torch.tensor(rollout).double(), junk], 1).flatten(),
        mask,
    )
    doubles = [torch.tensor(x).double().tolist() for x in (old, rollout)]
    wanted = mismatch_loop(*doubles)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name


def test_mismatch_of_equal_logprobs_is_zero():
    logprobs = -torch.rand(50)
    got = mismatch(logprobs, logprobs.clone(), torch.ones(50) > 0)
    ones = {"mismatch/ess", "mismatch/ppl_ratio"}
    assert got == {name: pytest.approx(float(name in ones), abs=1e-15) for name in got}


def test_mismatch_passes_nan_on_to_every_distance_and_counts_it():
    old = -torch.rand(50)
    rollout = -torch.rand(50)
    old[7] = rollout[9] = math.nan
    got = mismatch(old, rollout, torch.ones(50) > 0)
    assert got.pop("mismatch/nonfinite") == 2
    assert all(math.isnan(value) for value in got.values())


def test_mismatch_counts_a_token_the_trainer_finds_impossible():
    old = torch.full((4,), -1.0)
    rollout = torch.full((4,), -1.0)
    old[0] = -math.inf
    got = mismatch(old, rollout, torch.ones(4) > 0)
    assert got["mismatch/nonfinite"] == 1 and got["mismatch/f5"] == 0.25
    assert got["mismatch/k3"] == got["mismatch/max"] == math.inf


def test_mismatch_shows_collapse_in_the_sample_size_without_overflow():
    old = torch.zeros(100)
    rollout = torch.zeros(100)
    rollout[0] = -800.0  # r = exp(800) is beyond float64
    got = mismatch(old, rollout, torch.ones(100) > 0)
    assert got["mismatch/ess"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="0 tokens under the mask"):
        mismatch(old, rollout, torch.zeros(100) > 0)
