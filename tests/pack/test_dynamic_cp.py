"""plan_dynamic_cp: every sample once, limits kept, groups aligned, close to the optimum."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from pyrl_ext.pack.schedule import CostModel, Schedule, plan_dynamic_cp
from pyrl_ext.plan.forecast.cp_problem import Exchange
from pyrl_ext.plan.model.alignment import alignment
from tests.helpers.dynamic_cp import COST, problems


def check(plan: Schedule, seqlens, ranks, limit, **options) -> None:
    """Each claim of the docstring, from the lengths."""
    least, most = options.get("min_cp_size", 1), options.get("max_cp_size") or ranks
    tp, fp8 = options.get("tp_size", 1), options.get("fp8", False)
    assert plan.num_ranks == ranks
    assert sorted(plan.samples) == list(range(len(seqlens)))
    for groups in plan.microbatches:
        assert [r for group in groups for r in group.ranks] == list(range(ranks))
        for first, size, samples in groups:
            assert first % size == 0
            assert least <= size <= most
            assert size == ranks or (size // least) & (size // least - 1) == 0
            align = alignment(tp, size, fp8)
            assert sum(-(-seqlens[i] // align) * align for i in samples) <= limit * size
            assert list(samples) == sorted(samples)
    if options.get("vpp_size", 1) > 1:
        assert len(plan) % options["pp_size"] == 0
    if len(seqlens) >= len(plan):
        assert all(any(group.samples for group in groups) for groups in plan.microbatches)
    assert 0 < plan.lower_bound <= plan.makespan * (1 + 1e-12)


def makespan(plan: Schedule, seqlens, cost: CostModel, tp: int = 1, fp8: bool = False) -> float:
    """Seconds of the slowest group of every microbatch, from the formula of `CostModel`."""
    total = 0.0
    for groups in plan.microbatches:
        slowest = 0.0
        for _, size, samples in groups:
            align = alignment(tp, size, fp8)
            rows = [-(-seqlens[i] // align) * align for i in samples]
            received, exchange = sum(rows) * (size - 1) / size, cost.exchange(size)
            work = cost.token_seconds * sum(rows) + cost.square_seconds * sum(n * n for n in rows)
            if rows:
                moved = exchange.launch_seconds + exchange.token_seconds * received
                slowest = max(slowest, work / size + moved)
        total += cost.launch_seconds + slowest
    return total


@given(problems())
@settings(max_examples=300, deadline=None)
def test_plan_dynamic_cp_keeps_its_promises(problem):
    args, options = problem
    plan = plan_dynamic_cp(*args, cost=COST, **options)
    check(plan, *args, **options)
    paddings = options["tp_size"], options["fp8"]
    assert plan.makespan == pytest.approx(makespan(plan, args[0], COST, *paddings), rel=1e-9)
    assert plan == plan_dynamic_cp(tuple(args[0]), *args[1:], cost=COST, **options)


def test_plan_dynamic_cp_writes_json():
    plan = plan_dynamic_cp([90, 30, 20], 4, 32, cost=COST)
    told = json.loads(plan.to_json())
    assert told["makespan"] == plan.makespan
    assert told["lower_bound"] == plan.lower_bound
    groups = [group for groups in told["microbatches"] for group in groups]
    assert sorted(i for group in groups for i in group["samples"]) == [0, 1, 2]
    assert all(len(group["ranks"]) == group["cp_size"] for group in groups)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(seqlens=[]), "0 samples, expected at least 1"),
        (dict(seqlens=[5, 0]), "sample 1 has 0 tokens, expected at least 1"),
        (dict(seqlens=[5, 257]), r"sample 1 has 257 tokens, expected at most 256: .*8 ranks"),
        (dict(max_cp_size=2, seqlens=[65]), r"sample 0 has 65 tokens, expected at most 64"),
        (dict(num_ranks=0), "num_ranks is 0, expected at least 1"),
        (dict(max_tokens_per_rank=-1), "max_tokens_per_rank is -1, expected at least 1"),
        (dict(min_cp_size=0), "min_cp_size is 0, expected at least 1"),
        (dict(min_cp_size=3), "min_cp_size is 3 and num_ranks 8, expected a min_cp_size that div"),
        (dict(min_cp_size=4, max_cp_size=2), r"max_cp_size is 2, expected one of \[4, 8\]"),
        (dict(max_cp_size=6), r"max_cp_size is 6, expected one of \[1, 2, 4, 8\]"),
        (dict(max_cp_size=16), r"max_cp_size is 16, expected one of \[1, 2, 4, 8\]"),
        (dict(pp_size=0), "pp_size is 0, expected at least 1"),
        (dict(cost=CostModel(1, 1, 1, (Exchange(4, 0, 0),))), "a group has 8 ranks, expected at"),
    ],
)
def test_plan_dynamic_cp_refuses(changed, message):
    valid: dict[str, Any] = dict(seqlens=[5, 7], num_ranks=8, max_tokens_per_rank=32, cost=COST)
    plan_dynamic_cp(**valid)
    with pytest.raises(ValueError, match=message):
        plan_dynamic_cp(**valid | changed)
