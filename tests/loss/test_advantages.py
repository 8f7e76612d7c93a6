"""Advantages against numbers of published tests, and against plain Python in double precision."""

import random
import statistics

import pytest
import torch

from pyrl_ext.loss.registry import build_advantage
from pyrl_ext.plan.schema.objective import ADVANTAGES, Objective

REWARDS = [1, 0, 0, 1, 0.5, 0.5, 2]
GROUPS = [0, 0, 0, 0, 1, 1, 2]
TOKENS = [4, 2, 3, 1, 2, 4, 3]


def run(rewards=REWARDS, groups=GROUPS, tokens=TOKENS, **objective) -> list[float]:
    function = build_advantage(Objective(**objective))
    found = function(torch.tensor(rewards).float(), torch.tensor(groups), torch.tensor(tokens))
    assert found.dtype == torch.float32
    return found.tolist()


@pytest.mark.parametrize(
    ("objective", "want"),
    [
        ({}, [0.866024, -0.866024, -0.866024, 0.866024, 0, 0, 0]),
        ({"normalize_std": False}, [0.5, -0.5, -0.5, 0.5, 0, 0, 0]),
        ({"advantage": "rloo"}, [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0, 0]),
        (
            {"leave_one_out": True, "normalize_std": False},
            [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3, 0, 0, 0],
        ),
        ({"advantage": "opo"}, [0.5, -0.5, -0.5, 0.5, 0, 0, 0]),
        ({"advantage": "maxrl"}, [1, -1, -1, 1, 0, 0, 0]),
    ],
)
def test_advantages_equal_published_numbers(objective, want):
    assert run(**objective) == pytest.approx(want, abs=3e-6)


def test_opo_weighs_rewards_by_length():
    assert run([1, 0, 1], [0, 0, 0], [6, 3, 1], advantage="opo") == pytest.approx([0.3, -0.7, 0.3])


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_whitens_over_tokens(baseline: bool):
    means = {g: statistics.mean(r for r, h in zip(REWARDS, GROUPS) if h == g) for g in GROUPS}
    values = [r - means[g] * baseline for r, g in zip(REWARDS, GROUPS)]
    each = [v for v, n in zip(values, TOKENS) for _ in range(n)]
    mean = statistics.mean(each)
    std = statistics.stdev(each)
    name = "reinforce_pp_baseline" if baseline else "reinforce_pp"
    want = [(v - mean) / (std + 1e-6) for v in values]
    if baseline:  # a group of one
        want = [0 if GROUPS.count(g) == 1 else w for w, g in zip(want, GROUPS)]
    assert run(advantage=name) == pytest.approx(want, rel=1e-5)


def test_reinforce_pp_baseline_gives_a_group_of_one_zero():
    found = run([1.0, 0.0, 5.0], [0, 0, 1], [1, 4, 2], advantage="reinforce_pp_baseline")
    assert found[2] == 0 and found[1] < 0 < found[0]  # the mean over tokens is not 0


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_equals_the_loop(normalize_std: bool):
    rng = random.Random(0)
    groups = [rng.choice([3, 8, 5, 90]) for _ in range(30)] + [77]
    rewards = [rng.gauss(0, 3) for _ in groups]
    got = run(rewards, groups, [1] * 31, normalize_std=normalize_std)
    for s, group in enumerate(groups):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        wanted = rewards[s] - statistics.mean(members)
        if normalize_std and len(members) > 1:
            wanted /= statistics.stdev(members) + 1e-6
        assert got[s] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert got[-1] == 0


OF_GROUPS = [n for n in ADVANTAGES if n != "none" and not n.startswith("reinforce_pp")]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_advantages_give_equal_rewards_exactly_zero(name: str, reward: float):
    found = run([reward] * 7 + [1.0, 2.0], [4] * 7 + [5, 5], [3] * 9, advantage=name)
    assert found[:7] == [0] * 7 and found[7] < 0 < found[8]


def test_none_trains_on_no_reward():
    assert run([1.0, 0.0, 5.0], [0, 0, 1], [1, 4, 2], advantage="none") == [0, 0, 0]
