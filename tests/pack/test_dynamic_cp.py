"""plan_dynamic_cp: every sample once, limits kept, groups aligned, close to the optimum."""

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings

from benchmarks.dynamic_cp import DISTRIBUTIONS, row_of
from pyrl_ext.schedule import Schedule
from pyrl_ext.schedule import few_samples as few
from pyrl_ext.schedule.alignment import alignment
from pyrl_ext.schedule.cp_problem import CostModel, CpGroups, CpInstance, ExchangeCost
from pyrl_ext.schedule.cp_sizes import cp_group, cp_sizes
from pyrl_ext.schedule.native_search import search
from tests.helpers.dynamic_cp import COST, least_makespan, planned, problems


def check(plan: Schedule, seqlens, ranks, limit, **options) -> None:
    """Each claim of the docstring, from the lengths."""
    least = options.get("min_cp_size", 1)
    most = options.get("max_cp_size") or ranks
    tp = options.get("tp_size", 1)
    tile = options.get("tile_rows", 1)
    assert plan.num_ranks == ranks
    assert sorted(plan.samples) == list(range(len(seqlens)))
    for groups in plan.microbatches:
        assert [r for group in groups for r in group.ranks] == list(range(ranks))
        for first, size, samples in groups:
            group_ranks = range(first, first + size)
            assert first % size == 0
            assert least <= size <= most
            assert size == ranks or (size // least) & (size // least - 1) == 0
            assert size in cp_sizes(ranks, least, most)  # whose process groups ranks have
            assert all(cp_group(r, ranks, size) == group_ranks for r in group_ranks)
            align = alignment(tp, size, tile)
            assert sum(-(-seqlens[i] // align) * align for i in samples) <= limit * size
            assert list(samples) == sorted(samples)
    if options.get("vpp_size", 1) > 1:
        assert len(plan) % options["pp_size"] == 0
    if len(seqlens) >= len(plan):
        assert all(any(group.samples for group in groups) for groups in plan.microbatches)
    assert 0 < plan.lower_bound <= plan.makespan * (1 + 1e-12)


def makespan(plan: Schedule, seqlens, cost: CostModel, tp: int = 1, tile: int = 1) -> float:
    """Seconds of the slowest group of every microbatch, from the formula of `CostModel`."""
    total = 0.0
    for groups in plan.microbatches:
        slowest = 0.0
        for _, size, samples in groups:
            align = alignment(tp, size, tile)
            rows = [-(-seqlens[i] // align) * align for i in samples]
            received = sum(rows) * (size - 1) / size
            exchange = cost.exchange(size)
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
    plan = planned(*args, cost=COST, **options)
    check(plan, *args, **options)
    paddings = options["tp_size"], options["tile_rows"]
    assert plan.makespan == pytest.approx(makespan(plan, args[0], COST, *paddings), rel=1e-9)
    assert plan == planned(tuple(args[0]), *args[1:], cost=COST, **options)


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=lambda each: each.name)
def test_plan_dynamic_cp_meets_its_bars(lengths):
    """A part of the table of `python -m benchmarks.run dynamic_cp`, with its bars."""
    for ranks in (8, 32):
        row = row_of(lengths, ranks, seeds=10)
        assert row.passes, row


def few_samples(draw: random.Random, most: int, **options: Any) -> CpInstance:
    ranks = draw.choice([2, 3, 4, 6, 8])
    limit = 960
    samples = [draw.lognormvariate(6.4, 1) for _ in range(draw.randint(2, most))]
    exchange = ExchangeCost(8, 0, draw.choice([0, 80, 400]))
    cost = CostModel(4000, 1, draw.choice([8e4, 4e5, 1.2e6]), (exchange,))
    lengths = [min(limit * ranks, int(n) + 1) for n in samples]
    return CpGroups(ranks, limit, cost=cost, **options).problem(lengths)


@pytest.mark.parametrize("options", [{}, dict(pp_size=2, vpp_size=2), dict(pp_size=4, vpp_size=2)])
def test_plan_dynamic_cp_finds_the_best_plan_of_few_samples(options):
    """Against all plans; with several chunks, of whole rounds of microbatches."""
    draw = random.Random(7)
    for _ in range(30):
        problem = few_samples(draw, 6, **options)
        least = least_makespan(problem)
        found = search(problem)
        assert found.makespan == pytest.approx(least, rel=1e-12)
        assert found.lower_bound <= least * (1 + 1e-12)
        check_groups(found, problem)


def check_groups(found: Schedule, problem: CpInstance) -> None:
    """Every sample and every rank once, and as many microbatches as the multiple divides."""
    assert len(found.microbatches) % problem.multiple == 0
    held = [i for groups in found.microbatches for group in groups for i in group.samples]
    assert sorted(held) == list(range(len(problem.lengths)))
    for groups in found.microbatches:
        assert sum(group.cp_size for group in groups) == problem.num_ranks
        assert all(group.first % group.cp_size == 0 for group in groups)


def test_plan_dynamic_cp_is_near_the_best_plan_of_ten_samples(monkeypatch):
    """All plans are too many: within 1 % in the mean, 4 % in the worst of these cases."""
    draw = random.Random(1)
    found = []
    for _ in range(12):
        problem = few_samples(draw, 10)
        with monkeypatch.context() as patched:
            patched.setattr(few, "MOST_STEPS", 1 << 40)
            least = search(problem).makespan
            patched.setattr(few, "MOST_STEPS", 0)
            found.append(search(problem).makespan / least)
    assert min(found) >= 1 - 1e-12 and statistics.mean(found) <= 1.01 and max(found) <= 1.04


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 24, 48, 96])
def test_plan_dynamic_cp_takes_any_number_of_ranks(ranks):
    """Left-overs at unaligned ranks, and numbers of ranks that are no powers of two, made other
    planners crash, or use process groups that do not exist."""
    draw = random.Random(ranks)
    for _ in range(10):
        lengths = [min(ranks * 512, int(draw.lognormvariate(6, 1.2)) + 1) for _ in range(4 * ranks)]
        args = lengths, ranks, 1024
        check(planned(*args, cost=COST), *args)
        for most in (1, 2, ranks):
            short = [min(n, most * 512) for n in lengths], ranks, 1024
            plan = planned(*short, cost=COST, max_cp_size=most)
            check(plan, *short, max_cp_size=most)


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 31])
def test_plan_dynamic_cp_leaves_groups_empty_with_fewer_samples_than_ranks(samples):
    """Lists shared between idle ranks and an index of -1 put samples on ranks twice elsewhere."""
    args = [100 * (i + 1) for i in range(samples)], 32, 1024
    plan = planned(*args, cost=COST)
    check(plan, *args)
    narrow = planned(*args, cost=COST, max_cp_size=4)
    check(narrow, *args, max_cp_size=4)
    costly = CostModel(1e-6, 1e-10, 0.0, (ExchangeCost(32, 1.0, 0.0),))  # a second for any exchange
    alone = planned([10] * samples, 32, 1024, cost=costly)
    (groups,) = alone.microbatches
    assert [len(group.samples) for group in groups] == [1] * samples + [0] * (32 - samples)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_plan_dynamic_cp_makes_whole_rounds_of_pipeline_stages(pp):
    """Other planners gave up where a microbatch is one packed list, which can be split."""
    options: dict[str, Any] = dict(pp_size=pp, vpp_size=2)
    for samples in (*range(1, 2 * pp + 2), 50):
        plan = planned([20] * samples, 2, 1024, cost=COST, **options)
        check(plan, [20] * samples, 2, 1024, **options)
        assert len(plan) == pp
        held = [sum(len(group.samples) for group in groups) for groups in plan.microbatches]
        assert held.count(0) == max(0, pp - samples)
        assert max(held) <= 2 * -(-samples // pp)
    assert len(planned([20] * 50, 2, 1024, cost=COST, pp_size=pp)) == 1
    draw = random.Random(pp)
    for _ in range(20):
        lengths = [min(8192, int(draw.lognormvariate(7.6, 1.1)) + 1) for _ in range(64)]
        args = lengths, 8, 1024
        check(planned(*args, cost=COST, **options), *args, **options)


def test_plan_dynamic_cp_prices_a_sample_at_the_size_of_its_group():
    """Elsewhere the work of a sample was estimated at the size it needs, whatever it gets."""
    cost = CostModel(token_seconds=1.0, square_seconds=0.0)
    plan = planned([800, 100, 100, 100, 100], 8, 800, cost=cost)
    assert plan.makespan == 1200 / 8
    far = CostModel(1.0, 0.0, exchanges=(ExchangeCost(8, 0.0, 0.5),))
    plan = planned([800, 100, 100, 100, 100], 8, 800, cost=far)
    assert [g.cp_size for g in plan.microbatches[0]] == [4, 1, 1, 1, 1]
    assert plan.makespan == 800 / 4 + 0.5 * 600


@pytest.mark.parametrize("lengths", [[64] * 40, [512] + [8] * 100, [512, 256, 128, 64, 32, 16]])
def test_plan_dynamic_cp_takes_samples_of_few_sizes(lengths):
    """Elsewhere samples were dealt to a number of buckets that was not reached."""
    args = lengths, 8, 64
    plan = planned(*args, cost=COST)
    check(plan, *args)
    assert len(plan) <= math.ceil(1.25 * sum(lengths) / 512)


def test_plan_dynamic_cp_pads_a_sample_for_the_size_it_gets():
    """Padded for the largest group, each of these would take 128 rows."""
    lengths = [3] * 64
    plan = planned(lengths, 64, 4, cost=COST)
    assert [[g.cp_size for g in groups] for groups in plan.microbatches] == [[1] * 64]
    wide = planned([130] + [3] * 60, 64, 4, cost=COST)
    check(wide, [130] + [3] * 60, 64, 4)
    assert wide.microbatches[0][0].samples == (0,)


def test_plan_dynamic_cp_keeps_its_promises_to_few_samples():
    check(planned([90, 30, 20], 4, 32, cost=COST), [90, 30, 20], 4, 32)


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
        (
            dict(cost=CostModel(1, 1, 1, (ExchangeCost(4, 0, 0),))),
            "a group has 8 ranks, expected at",
        ),
    ],
)
def test_plan_dynamic_cp_refuses(changed, message):
    valid: dict[str, Any] = dict(seqlens=[5, 7], num_ranks=8, max_tokens_per_rank=32, cost=COST)
    planned(**valid)
    with pytest.raises(ValueError, match=message):
        planned(**valid | changed)
