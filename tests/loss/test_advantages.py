"""Advantages against plain Python in double precision."""

import random
import statistics

import pytest
import torch

from pyrl_ext.loss.advantages import grpo


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_equals_the_loop(normalize_std):
    rng = random.Random(0)
    groups = [rng.choice([3, 8, 5, 90]) for _ in range(30)] + [77]
    rewards = [rng.gauss(0, 3) for _ in groups]
    got = grpo(torch.tensor(rewards), torch.tensor(groups), normalize_std)
    for s, group in enumerate(groups):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        wanted = rewards[s] - statistics.mean(members)
        if normalize_std and len(members) > 1:
            wanted /= statistics.stdev(members) + 1e-6
        assert float(got[s]) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert got[-1] == 0 and got.dtype == torch.float32


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_grpo_gives_equal_rewards_exactly_zero(reward):
    rewards = torch.tensor([reward] * 7 + [1.0, 2.0])
    advantages = grpo(rewards, torch.tensor([4] * 7 + [5, 5]))
    assert torch.equal(advantages[:7], torch.zeros(7))
    assert advantages[7] == -advantages[8] != 0
