"""plan_microbatches: every sample once, limits kept, close to the optimum, the same every time."""

import math
from collections import Counter, defaultdict
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.dynamic_cp import DISTRIBUTIONS, affine, quality
from pyrl_ext.pack.encoder_work import EncoderWork
from pyrl_ext.pack.images import Images
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.rank_rows import Lengths
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.cp_groups import costs_of, cp_groups
from pyrl_ext.schedule import Group, Schedule, plan_microbatches
from pyrl_ext.schedule.cp_problem import CostModel, ExchangeCost
from pyrl_ext.schedule.packing import equal_parts, least_work_first, pack_samples
from tests.helpers.dynamic_cp import planned
from tests.helpers.pictures import write_run
from tests.helpers.tiny import tiny_plan


def bins_of(*args):
    return bins(plan_microbatches(*args))


def bins(schedule):
    """[microbatch][data-parallel rank] -> sample ids."""
    return [tuple(g.samples for g in groups) for groups in schedule.microbatches]


def padded(n: int, align: int) -> int:
    return -(-n // align) * align


def best_fullest_bin(loads: list[int], num_bins: int) -> int:
    """The least load that the fullest bin can have; equal bins are tried once."""
    fills = {(0,) * num_bins}
    for load in loads:
        grown = ((f, i) for f in fills for i in range(num_bins))
        fills = {tuple(sorted((*f[:i], f[i] + load, *f[i + 1 :]))) for f, i in grown}
    return min(max(fill) for fill in fills)


@given(
    seqlens=st.lists(st.integers(1, 90), min_size=1, max_size=60),
    dp_size=st.integers(1, 5),
    limit=st.integers(1, 200),
    align=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=300, deadline=None)
def test_plan_microbatches_places_every_sample_once_within_limits(seqlens, dp_size, limit, align):
    limit = max(limit, *(padded(n, align) for n in seqlens))
    plan = plan_microbatches(seqlens, dp_size, limit, align)
    assert plan.num_ranks == dp_size
    assert all([g.first for g in groups] == [*range(dp_size)] for groups in plan.microbatches)
    assert sorted(plan.samples) == list(range(len(seqlens)))
    held = [sum(padded(seqlens[i], align) for i in ids) for each in bins(plan) for ids in each]
    assert max(held) <= limit
    assert all(any(ids for ids in each) for each in bins(plan))
    assert plan == plan_microbatches(tuple(seqlens), dp_size, limit, align)
    shared = plan_microbatches(seqlens, dp_size, -(-limit // 2), align, cp_size=2)
    for groups in shared.microbatches:
        assert [(g.first, g.cp_size) for g in groups] == [(2 * i, 2) for i in range(dp_size)]
    if limit % 2 == 0:
        assert bins(shared) == bins(plan)


@given(
    loads=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    dp_size=st.integers(1, 3),
    limit=st.integers(10, 60),
)
@settings(max_examples=150, deadline=None)
def test_pack_samples_fills_bins_within_four_thirds_of_the_optimum(loads, dp_size, limit):
    limit = max(limit, *loads)
    table = pack_samples(loads, dp_size, limit)
    num_bins = dp_size * len(table[0])
    assume(num_bins ** len(loads) <= 20_000)
    held = [sum(loads[i] for i in ids) for rank in table for ids in rank]
    assert 3 * max(held) <= 4 * best_fullest_bin(loads, num_bins)


@given(
    loads=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    dp_size=st.integers(1, 3),
    limit=st.integers(30, 40),
)
@settings(max_examples=100, deadline=None)
def test_plan_microbatches_makes_few_microbatches(loads, dp_size, limit):
    fewest = next(n for n in range(1, 8) if best_fullest_bin(loads, n) <= limit)
    first_fit = (11 * fewest + 6) // 9  # bins that first fit decreasing needs at most
    assert len(plan_microbatches(loads, dp_size, limit)) <= -(-first_fit // dp_size)


def least_makespan(costs: list[float], rows: list[int], dp_size: int, most: int, limit: int):
    """The least sum over microbatches of the slowest rank, over all plans of at most ``most``."""
    cells = [(m, rank) for m in range(most) for rank in range(dp_size)]
    least = math.inf
    for places in product(cells, repeat=len(rows)):
        held = Counter[tuple[int, int]]()
        time = defaultdict[tuple[int, int], float](float)
        for place, n, cost in zip(places, rows, costs, strict=True):
            held[place] += n
            time[place] += cost
        if max(held.values()) <= limit:
            slowest = [max(time[m, rank] for rank in range(dp_size)) for m in range(most)]
            least = min(least, sum(slowest))
    return least


@given(
    rows=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    dp_size=st.integers(1, 2),
    limit=st.integers(20, 50),
    square=st.sampled_from([0.0, 0.125, 1.0]),
)
@settings(max_examples=100, deadline=None)
def test_plan_microbatches_finds_the_fastest_plan_of_few_samples(rows, dp_size, limit, square):
    limit = max(limit, *rows)
    cost = CostModel(1.0, square, launch_seconds=2.0, exchanges=(ExchangeCost(2, 1.0, 0.5),))
    plan = plan_microbatches(rows, dp_size, limit, cost=cost)
    most = len(pack_samples(rows, dp_size, limit)[0])
    assert len(plan) <= most
    costs = [n + square * n * n for n in rows]
    slowest = [max(sum(costs[i] for i in ids) for ids in each) for each in bins(plan)]
    assert plan.makespan == pytest.approx(2.0 * len(plan) + sum(slowest))
    assert plan.lower_bound <= plan.makespan + 1e-9
    least = min(
        2.0 * number + least_makespan(costs, rows, dp_size, number, limit)
        for number in range(1, most + 1)
    )
    assert plan.makespan == pytest.approx(least)


def test_plan_microbatches_balances_the_work_that_the_costs_name():
    """By its square, a sample of 4 rows works as long as 16 of one."""
    cost = CostModel(token_seconds=0.0, square_seconds=1.0)
    plan = plan_microbatches([4, *[2] * 4, 4], 2, 100, cost=cost)
    assert plan.makespan == plan.lower_bound == 24
    uneven = plan_microbatches([4, *[1] * 16], 2, 100, cost=cost)
    assert sorted(len(ids) for ids in bins(uneven)[0]) == [1, 16]
    shared = plan_microbatches([4, *[1] * 16], 2, 50, 1, 2, cost)
    assert bins(shared) == bins(uneven) and shared.makespan == uneven.makespan / 2


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=lambda each: each.name)
@pytest.mark.parametrize(("samples", "ranks"), [(512, 8), (4096, 8), (4096, 64)])
def test_plan_microbatches_balances_work_without_more_microbatches(lengths, samples, ranks):
    """Within 2.1 % of an even share, where a rank has 64 samples or more."""
    rows = lengths.drawn(samples, 16384, seed=1)
    plan = plan_microbatches(rows, ranks, 16384, cost=affine(16384, 24576))
    found = quality([[(1, ids) for ids in each] for each in bins(plan)], rows, ranks, 16384, 24576)
    assert found.balance < 1.021
    assert len(plan) <= len(pack_samples(rows, ranks, 16384)[0])


def test_least_work_first_returns_to_a_bin_when_a_sample_fits():
    """The first bin has the least work, no room for sample 2, and just enough for sample 3."""
    bins = least_work_first([6, 5, 5, 4], [1, 9, 9, 9], [0, 1, 2, 3], num_bins=2, limit=10)
    assert bins == [[0, 3], [1, 2]]
    assert least_work_first([6, 5, 5, 5], [1, 9, 9, 9], [0, 1, 2, 3], num_bins=2, limit=10) is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_equal_parts_are_equally_many_and_about_equal(work, num_parts):
    """Each value is there once for every part, so the best division is even."""
    work = work * num_parts
    parts = equal_parts(work, num_parts)
    assert sorted(i for ids in parts for i in ids) == [*range(len(work))]
    assert {len(ids) for ids in parts} == {len(work) // num_parts}
    assert all(ids == sorted(ids) for ids in parts)
    assert max(sum(work[i] for i in ids) for ids in parts) == sum(work) // num_parts


def test_equal_parts_gives_long_ones_to_different_parts():
    assert equal_parts([9, 1, 8, 1, 7, 1], 3) == [[0, 5], [2, 3], [1, 4]]
    assert equal_parts([2, 2, 2, 100], 2) == [[2, 3], [0, 1]]


@pytest.mark.parametrize("num_parts", [0, -1, 2, 6])
def test_equal_parts_refuses_numbers_that_do_not_divide(num_parts):
    with pytest.raises(ValueError, match=f"5 samples and num_parts {num_parts}, expected"):
        equal_parts([1] * 5, num_parts)


def test_pack_samples_first_fit_saves_a_microbatch():
    seqlens = [3, 3, 2, 2, 2]  # least work first gives 3 + 2 + 2 and 3 + 2
    assert pack_samples(seqlens, 2, 7) == (((0, 2, 4),), ((1, 3),))
    assert pack_samples(seqlens, 2, 6) == (((0, 1),), ((2, 3, 4),))
    assert bins_of(seqlens, 2, 7) == bins_of(seqlens, 2, 6) == [((0, 1), (2, 3, 4))]


def test_plan_microbatches_leaves_no_rank_without_a_sample():
    """Emptiest first overflows 7 bins of 30, first fit fills 6 of them to the brim."""
    seqlens = [20, 18, 16, 15, 15, 14, 13, 12, 10, 9, 9, 8, 7, 7, 7]
    (only,) = bins_of(seqlens, 7, 30)
    assert sorted(sum(seqlens[i] for i in ids) for ids in only)[:2] == [10, 20]


def test_plan_microbatches_evens_out_the_totals_of_ranks():
    assert bins_of([8, 7, 6, 5], 2, 8) == [((0,), (1,)), ((3,), (2,))]


def test_plan_microbatches_pairs_microbatches_of_equal_size():
    seqlens = [100, 100, 50, 50, 10, 10]
    plan = plan_microbatches(seqlens, 2, 100)
    for first, second in bins(plan):
        assert sum(seqlens[i] for i in first) == sum(seqlens[i] for i in second)


def test_plan_microbatches_leaves_bins_empty_if_samples_are_few():
    assert bins_of([5, 7], 4, 8) == [((1,), (0,), (), ())]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (([5, 9, 4], 1, 8), r"sample 1 has 9 rows .*at most tokens_per_microbatch x cp = 8"),
        (([5, 7, 4], 1, 9, 5), r"sample 1 has 7 rows \(10 padded to a multiple of 5\)"),
        (([5, 0], 1, 8), r"sample 1 has 0 rows, expected at least 1"),
        (([], 1, 8), r"0 samples"),
        (([1], 0, 8), r"dp_size is 0"),
        (([1], 1, 8, 0), r"align is 0"),
    ],
)
def test_plan_microbatches_refuses_wrong_arguments(args, match):
    with pytest.raises(ValueError, match=match):
        plan_microbatches(*args)


def test_schedule_group_of_finds_the_group_of_a_rank():
    groups = (Group(0, 4, (0, 1)), Group(4, 2, ()), Group(6, 1, (2,)), Group(7, 1, (3,)))
    schedule = Schedule(8, (groups,))
    expected = [groups[0]] * 4 + [groups[1]] * 2 + [groups[2], groups[3]]
    assert [schedule.group_of(0, rank) for rank in range(8)] == expected
    assert [rank for group in groups for rank in group.ranks] == [*range(8)]


def test_schedule_padded_appends_empty_microbatches():
    schedule = plan_microbatches([5, 7, 9], 1, 10, cp_size=2)
    longer = schedule.padded(4)
    assert longer.microbatches[: len(schedule)] == schedule.microbatches
    assert longer.microbatches[len(schedule) :] == ((Group(0, 2, ()),),) * (4 - len(schedule))
    assert schedule.padded(len(schedule)) == schedule


def test_schedule_renumbered_names_other_samples():
    schedule = plan_microbatches([5, 7, 9], 1, 10).renumbered([30, 10, 20])
    assert sorted(schedule.samples) == [10, 20, 30]
    assert schedule.digest != plan_microbatches([5, 7, 9], 1, 10).digest


def test_schedule_names_every_group():
    schedule = plan_microbatches([5, 7], 2, 10, cp_size=2)
    assert schedule.num_ranks == 4 and (schedule.makespan, schedule.lower_bound) == (3.5, 3.5)
    assert schedule.microbatches == ((Group(0, 2, (1,)), Group(2, 2, (0,))),)
    assert [[*group.ranks] for group in schedule.microbatches[0]] == [[0, 1], [2, 3]]


DYNAMIC = (
    "parallel.dp=4",
    "parallel.cp=2",
    "parallel.dynamic_cp=4",
    "parallel.tp=2",
    "parallel.pp=2",
    "parallel.ep=2",
    "parallel.vpp=2",
    "hardware.gpu=H100",
    "batching.tokens_per_microbatch=32",
)


def test_Scheduler_gives_the_planner_the_sizes_of_the_plan():
    """Each argument written out; lengths at which each of them matters."""
    plan = tiny_plan(*DYNAMIC)
    seqlens = [121, 61, 60, 59, 33, 32, 31, 17, 9, 5, 3, 1, 90, 45]
    asked = planned(
        seqlens,
        8,
        32,
        cost=costs_of(plan),
        min_cp_size=2,
        max_cp_size=4,
        tp_size=2,
        pp_size=2,
        vpp_size=2,
    )
    scheduler = Scheduler(plan)
    assert scheduler.schedule(seqlens) == asked
    assert scheduler.schedule(seqlens[:5]) == Scheduler(plan).schedule(seqlens[:5])
    fixed = Scheduler(
        tiny_plan("parallel.dp=2", "parallel.cp=2", "parallel.pp=2", "parallel.vpp=2")
    )
    tokens = fixed.plan.batching.tokens_per_microbatch
    align = fixed.plan.row_alignment
    cost = replace(costs_of(fixed.plan), exchanges=())
    even = plan_microbatches([7, 5, 3], 2, tokens, align, 2, cost)
    assert fixed.schedule([7, 5, 3]) == even.padded(2) and len(even) == 1


def test_Scheduler_prices_groups_once(monkeypatch):
    """Pricing a plan takes longer than planning a minibatch."""
    from pyrl_ext.pack import schedule

    priced = []
    monkeypatch.setattr(schedule, "cp_groups", lambda plan: priced.append(0) or cp_groups(plan))
    scheduler = Scheduler(tiny_plan("parallel.dp=2", "parallel.dynamic_cp=2"))
    for number in (1, 2, 3):
        scheduler.schedule([5] * number)
    assert len(priced) == 1


def full(schedule: Schedule) -> int:
    """Microbatches with samples."""
    return sum(any(group.samples for group in groups) for groups in schedule.microbatches)


STAGES = "pipeline_model_parallel_layout=Ett|t|t|L"  # features behind the first two layers


def index_of(lengths: list[int], groups: list[int]) -> BatchIndex:
    """Samples of these rows and groups; the other numbers do not matter here."""
    columns: dict[str, Any] = {
        f.name: np.zeros(len(lengths), np.int32) for f in fields(BatchIndex)[:14]
    }
    columns |= dict(seqlens=np.array(lengths), groups=np.array(groups))
    return BatchIndex(**columns)


@pytest.mark.parametrize("dynamic", ["null", "2"])
def test_Scheduler_minibatches_name_the_samples_of_the_batch(dynamic):
    """Groups are dealt to minibatches in the order in which they come."""
    plan = tiny_plan("parallel.dp=2", f"parallel.dynamic_cp={dynamic}", "batching.minibatches=2")
    lengths = [9, 30, 12, 40, 7, 3, 21, 18]
    groups = [5, 5, 2, 2, 8, 8, 1, 1]
    scheduler = Scheduler(plan)
    index = index_of(lengths, groups)
    first, second = scheduler.minibatches(index)
    assert sorted(first.samples) == [0, 1, 2, 3] and sorted(second.samples) == [4, 5, 6, 7]
    assert second == scheduler.schedule(lengths[4:]).renumbered([4, 5, 6, 7])
    (whole,) = scheduler.minibatches(index, 1)
    assert sorted(whole.samples) == list(range(8))
    assert whole.digest != scheduler.minibatches(index, 4)[0].digest


@pytest.mark.parametrize("dynamic", ["null", "2"])
@pytest.mark.parametrize("rows", [0, 50_000])
def test_Scheduler_minibatches_say_which_minibatch_has_a_sample_that_fits_nowhere(dynamic, rows):
    plan = tiny_plan("parallel.dp=2", f"parallel.dynamic_cp={dynamic}", "batching.minibatches=2")
    index = index_of([9, 30, 12, rows], [0, 0, 1, 1])
    with pytest.raises(ValueError, match=f"^minibatch 1 of 2: plan_.*: sample 1 has {rows} "):
        Scheduler(plan).minibatches(index)


@pytest.mark.parametrize("layout", ["dp=2", f"pp=2 vpp=2 {STAGES}", "dp=2 dynamic_cp=2"])
def test_Scheduler_minibatches_hold_what_an_encoder_takes_in_a_pass(layout, tmp_path):
    """Two replicas of 256 patches, an interleaved pipeline's multiple, and the same groups."""
    words = [f"parallel.{word}" for word in layout.split()]
    words += ["modules.vision.parallel.dp=2", "batching.tokens_per_microbatch=512"]
    plan = compile_plan(write_run(tmp_path), words)
    lengths = [90, 90, 70, 80, 75, 66, 90, 70]
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    table = [(i, 0, 64, 1, 16, 16) for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    table.insert(7, (6, 64, 9, 1, 6, 6))  # the second minibatch needs three
    index = index_of(lengths, groups)
    index = replace(index, images=Images.of(np.asarray(table)))
    bare = Scheduler(plan).minibatches(replace(index, images=Images.of(np.empty(0))))
    found = Scheduler(plan).minibatches(index)
    stages = plan.parallel.pp if plan.parallel.vpp else 1
    for before, schedule in zip(bare, found, strict=True):
        assert sorted(schedule.samples) == sorted(before.samples)
        assert len(schedule) % stages == 0
        assert any(g.samples for m in schedule.microbatches[-stages:] for g in m)
        where = {i: (g.first, g.cp_size) for m in before.microbatches for g in m for i in g.samples}
        for groups_of in schedule.microbatches:
            assert [r for g in groups_of for r in g.ranks] == [*range(schedule.num_ranks)]
            assert all((g.first, g.cp_size) == where[i] for g in groups_of for i in g.samples)
        work = EncoderWork(index.images, schedule, Lengths(index.seqlens, index.starts), 2)
        for m, replica in product(range(len(schedule)), range(2)):
            assert index.images.patches[work.ids(m, replica)].sum() <= 256
    assert sum(map(full, found)) > sum(map(full, bare))
    large = Images.of(np.asarray([(5, 0, 64, 1, 16, 16)] * 3))
    found = r"minibatch 1 of 2: within_patches: sample 5 has images of \[256, 256, 256\] patches, "
    with pytest.raises(ValueError, match=found + ".*modules.vision.patches_per_microbatch 256 on"):
        Scheduler(plan).minibatches(replace(index, images=large))
