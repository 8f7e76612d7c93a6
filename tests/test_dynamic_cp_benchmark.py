"""The benchmark of dynamic context parallelism: its measures and fits are right."""

import pytest

from benchmarks.calibrate_cp import (
    SHAPES,
    Timed,
    fit,
    group_plan,
    measure,
    predicted,
    report,
    sizes_of,
)
from benchmarks.configs import TINY
from benchmarks.dynamic_cp import quality
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.cp_groups import costs_of
from pyrl_ext.schedule.cp_problem import CostModel, ExchangeCost


def test_quality_of_plans_made_by_hand():
    lengths = [4096, 4096, 8192]
    linear = 16384
    costs = [n * (n + linear) for n in lengths]
    balanced = quality([[(1, (0,)), (1, (1,))], [(2, (2,))]], lengths, ranks=2, limit=4096)
    assert balanced == (1.0, 1.0, 1.5)
    idle = quality([[(1, (0,))], [(1, (1,))], [(2, (2,))]], lengths, ranks=2, limit=4096)
    slowest = costs[0] + costs[1] + costs[2] / 2
    assert idle == (pytest.approx(slowest / (sum(costs) / 2)), 1.5, 1.5)


COST = CostModel(
    2e-5, 3e-9, 4e-3, (ExchangeCost(2, 1e-3, 5e-7, 4e-10), ExchangeCost(4, 2e-3, 8e-7, 1e-10))
)
EXACT = [
    each._replace(seconds=predicted(COST, each))
    for each in (Timed(size, shape, 0.0) for size in (1, 2, 4) for shape in SHAPES)
]


def test_fit_finds_the_costs_behind_exact_times():
    found = fit(EXACT)
    for fitted, exact in zip(found.exchanges, COST.exchanges, strict=True):
        assert [*fitted] == pytest.approx([*exact], rel=1e-6)
    ours = found.token_seconds, found.square_seconds, found.launch_seconds
    assert ours == pytest.approx((COST.token_seconds, COST.square_seconds, COST.launch_seconds))
    free = [t._replace(seconds=predicted(CostModel(2e-5, 0.0), t)) for t in EXACT]
    assert fit(free).square_seconds == pytest.approx(0, abs=1e-12)


def test_fit_is_moved_little_by_one_wrong_time():
    """Plain least squares would put 20 % and more on other shapes."""
    wrong = [t._replace(seconds=t.seconds * (1 + (i == 3))) for i, t in enumerate(EXACT)]
    found = fit(wrong)
    errors = [abs(predicted(found, t) / t.seconds - 1) for t in EXACT if t.cp_size == 1]
    assert max(errors) < 0.07


def test_report_prints_every_residual_and_says_what_to_trust():
    lines = report(EXACT, fit(EXACT))
    assert len(lines) == len(EXACT) + 2
    assert all(line.endswith("+0%") or line.endswith("-0%") for line in lines[: len(EXACT)])
    assert "to be trusted: errors and rounds are within 15%" in lines[-2]
    off = [EXACT[0]._replace(seconds=1.3 * EXACT[0].seconds), *EXACT[1:]]
    told = report(off, fit(EXACT))
    assert told[0].endswith("-23%")
    assert "largest error 23%" in told[-2] and "NOT to be trusted" in told[-2]
    loud = [EXACT[0]._replace(spread=0.4), *EXACT[1:]]
    assert "(+- 40%)" in report(loud, fit(EXACT))[0]
    assert "NOT to be trusted" in report(loud, fit(EXACT))[-2]


def test_report_ends_with_the_section_that_the_planner_reads(tmp_path):
    config = tmp_path / "measured.yaml"
    section = "\n".join(line for line in report(EXACT, fit(EXACT)) if not line.startswith("#"))
    layout = "parallel: {dp: 4, dynamic_cp: 4}"
    config.write_text(f"extends: {TINY}\n{layout}\n{section}\n")
    assert costs_of(compile_plan(config)) == fit(EXACT)


def test_measure_runs_the_real_model():
    plan = group_plan(str(TINY), ["parallel.dp=2", "parallel.dynamic_cp=2"], 1)
    (timed,) = measure(plan, [(8, 4)])
    assert (timed.cp_size, timed.lengths) == (1, (8, 4))
    assert timed.seconds > 0


def test_sizes_of_groups_to_measure():
    assert sizes_of(compile_plan(TINY)) == [1, 2]
    assert sizes_of(compile_plan(TINY, ["parallel.dp=8", "parallel.dynamic_cp=8"])) == [1, 2, 4, 8]
