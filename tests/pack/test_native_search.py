"""The native planner finds the plan of the Python reference, to the last bit of its times."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.schedule.cp_problem import CostModel, CpGroups
from pyrl_ext.schedule.dynamic_cp import search
from pyrl_ext.schedule.native_search import search_native
from tests.helpers.dynamic_cp import COST, problems

FREE = CostModel(1e-6, 1e-10)  # launches and communication cost nothing, as operations are counted


@given(problems(), st.sampled_from([COST, FREE]))
@settings(max_examples=100, deadline=None)
def test_search_native_equals_reference(problem, cost):
    args, options = problem
    seqlens, *grid = args
    checked = CpGroups(*grid, cost=cost, **options).problem(seqlens)
    assert search_native(checked) == search(checked)


@pytest.mark.parametrize("samples", range(1, 10))
def test_search_native_equals_reference_for_few_samples(samples):
    """About the number up to which all plans are looked at, ties among them."""
    draw = random.Random(samples)
    for ranks, vpp in ((2, 1), (8, 1), (6, 2)):
        lengths = [min(ranks * 512, int(draw.lognormvariate(6, 1.2)) + 1) for _ in range(samples)]
        for each in (lengths, [100] * samples):
            checked = CpGroups(ranks, 512, cost=COST, pp_size=2, vpp_size=vpp).problem(each)
            assert search_native(checked) == search(checked)


@pytest.mark.parametrize(("samples", "ranks"), [(200, 12), (1100, 16)])
def test_search_native_equals_reference_for_many_samples(samples, ranks):
    """Beyond the numbers of samples at which fewer variants are tried."""
    draw = random.Random(samples)
    lengths = [min(12 * 512, int(draw.lognormvariate(6, 1.2)) + 1) for _ in range(samples)]
    for vpp in (1, 2):
        checked = CpGroups(ranks, 512, cost=COST, pp_size=4, vpp_size=vpp).problem(lengths)
        assert search_native(checked) == search(checked)


def test_search_native_refuses_a_sample_that_no_group_holds():
    problem = CpGroups(4, 16, cost=COST).problem([5, 64])
    with pytest.raises(ValueError, match="sample 0 has 65 tokens, expected at most"):
        search_native(problem._replace(lengths=(65, 5)))
