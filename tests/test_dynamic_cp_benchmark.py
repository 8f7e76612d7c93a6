"""The benchmark of dynamic context parallelism: its greedy schedulers and measures are right."""

import random

import pytest

from benchmarks.dynamic_cp import DISTRIBUTIONS, quality
from benchmarks.greedy_cp import GREEDY
from benchmarks.simulate_cp import CONFIG, lognormal, simulate
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.cp_problem import problem_of
from pyrl_ext.plan.forecast.strategies import costs_of


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_plans_hold_every_sample_once(name):
    ranks, how = 16, GREEDY[name]
    for lengths in DISTRIBUTIONS[:3]:
        batch = lengths.of(ranks, seed=1)
        plan = how.plan(batch, ranks, lengths.limit)
        assert sorted(i for groups in plan for _, ids in groups for i in ids) == [
            *range(len(batch))
        ]
        for groups in plan:
            assert sum(size for size, _ in groups) <= ranks
            for size, ids in groups:
                assert all(batch[i] <= size * lengths.limit for i in ids)
                if how.token_limit:
                    assert sum(batch[i] for i in ids) <= size * lengths.limit


def test_quality_of_plans_made_by_hand():
    lengths, linear = [4096, 4096, 8192], 16384
    costs = [n * (n + linear) for n in lengths]
    balanced = quality([[(1, (0,)), (1, (1,))], [(2, (2,))]], lengths, ranks=2, limit=4096)
    assert balanced == (1.0, 1.0, 1.5)
    idle = quality([[(1, (0,))], [(1, (1,))], [(2, (2,))]], lengths, ranks=2, limit=4096)
    slowest = costs[0] + costs[1] + costs[2] / 2
    assert idle == (pytest.approx(slowest / (sum(costs) / 2)), 1.5, 1.5)


def test_simulate_prices_dynamic_groups_below_fixed_ones():
    plan = compile_plan(CONFIG)
    lengths = lognormal(2000, 1.1)(random.Random(0))
    problem = problem_of(lengths, 32, 3072, cost=costs_of(plan).model, max_cp_size=16)
    found = simulate(problem)
    assert found.dynamic < found.packed < found.padded
    assert 1 < found.cp < 16
