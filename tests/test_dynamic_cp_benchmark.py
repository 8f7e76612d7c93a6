"""The benchmark of dynamic context parallelism: its greedy schedulers and measures are right."""

import random

import pytest
import yaml

from benchmarks.calibrate_cp import CONFIG as TINY
from benchmarks.calibrate_cp import SHAPES, Timed, as_yaml, fit, measure, predicted
from benchmarks.dynamic_cp import DISTRIBUTIONS, quality
from benchmarks.greedy_cp import GREEDY
from benchmarks.simulate_cp import CONFIG, lognormal, simulate
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.cp_costs import costs_of
from pyrl_ext.plan.forecast.cp_problem import CostModel, CpGroups, Exchange


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
    problem = CpGroups(32, 3072, cost=costs_of(plan).model, max_cp_size=16).problem(lengths)
    found = simulate(problem)
    assert found.dynamic < found.packed < found.padded
    assert 1 < found.cp < 16


def test_fit_finds_the_costs_behind_exact_times():
    cost = CostModel(2e-5, 3e-9, 4e-3, (Exchange(2, 1e-3, 5e-7), Exchange(4, 2e-3, 8e-7)))
    timed = [Timed(size, shape, 0.0) for size in (1, 2, 4) for shape in SHAPES]
    found, error = fit([t._replace(seconds=predicted(cost, t)) for t in timed])
    assert error < 1e-6
    assert [*found.exchanges[1]] == pytest.approx([*cost.exchanges[1]])
    assert found.square_seconds == pytest.approx(cost.square_seconds)
    read = yaml.safe_load(as_yaml(found))
    read["exchanges"] = tuple(Exchange(*each) for each in read["exchanges"])
    assert CostModel(**read) == found
    free = [t._replace(seconds=predicted(CostModel(2e-5, 0.0), t)) for t in timed]
    assert fit(free)[0].square_seconds == pytest.approx(0, abs=1e-12)


def test_measure_runs_the_real_model():
    (timed,) = measure(str(TINY), [], [(8, 4)])
    assert timed.cp_size == 1
    assert timed.seconds > 0
