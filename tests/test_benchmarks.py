"""The benchmarks measure what they say: equal results, right bytes, bars that can fail."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
import torch

from benchmarks import run, step_many_ranks, tables
from benchmarks.cases import FAMILIES, cases_of
from benchmarks.cases_logprob import agree, exact_error
from benchmarks.lengths import lognormal
from benchmarks.measure import CLOCKS, Case, call_seconds, check, extra_bytes, measure, same
from benchmarks.per_sequence import TRAINERS
from benchmarks.plot import plot

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_of_has_baselines_that_compute_the_same(family):
    names = []
    for case in cases_of(family)("cpu", 256):  # one by one: a family may hold process groups open
        names.append(case.name)
        check(case)
        assert case.baselines
        assert 0 < case.written <= case.moved
        assert case.at_least.keys() <= {*case.baselines, "2 threads", "% of floor"}
    assert len({*names}) == len(names) > 0


def test_step_many_ranks_computes_the_same_as_with_megatrons_experts(monkeypatch, capsys):
    """At a narrow width: `compare` raises where outputs, gradients or log-probs differ."""
    narrow = {"hidden_size": 64, "moe_intermediate_size": 32}
    monkeypatch.setattr(step_many_ranks, "WIDE", step_many_ranks.WIDE | narrow)
    monkeypatch.setattr(sys, "argv", ["step_many_ranks", "--tokens", "128", "--rounds", "1"])
    step_many_ranks.main()
    assert capsys.readouterr().out.count("its products alone allow") == 3


def test_measure_times_no_case_that_differs_from_a_baseline():
    case = _ones()
    with pytest.raises(ValueError, match="ones: the result differs from wrong's"):
        measure(replace(case, baselines={"wrong": lambda: torch.zeros(100_000)}), "cpu")


def test_check_holds_ours_to_float64_and_reports_baselines():
    case = replace(
        _ones(),
        error=lambda found: 1.0 - float(found[0]),
        baselines={"off": lambda: torch.zeros(1)},
    )
    case = replace(case, agree=lambda ours, theirs: True, error_at_most=0.1)
    assert check(case) == {"ours": 0, "off": 1}
    with pytest.raises(ValueError, match=r"against float64 is 1, expected at most 0\.1"):
        check(replace(case, run=lambda: torch.zeros(1)))
    with pytest.raises(ValueError, match="against float64 is nan"):
        check(replace(case, run=lambda: torch.full((1,), torch.nan)))


def test_same_takes_floats_to_rounding_and_integers_exactly():
    ones = torch.ones(3)
    assert same((ones, [torch.tensor(2)]), (ones + 3e-7, [torch.tensor(2)]))
    assert not same(ones, ones + 1e-5)
    assert not same(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_bars_pass_and_fail_by_what_was_measured():
    row = measure(_ones(at_most={"ms": 1e4, "x written": 0}, at_least={"fill": 1e9}), "cpu")
    assert row["GB/s"] == pytest.approx(400_000 / row["ms"] / 1e6)
    lines = tables.bars([row])
    assert [line.split("  ")[:2] for line in lines] == [
        ["PASS", "ms at most 10000:"],
        ["FAIL", "x written at most 0:"],
        ["FAIL", "fill at least 1e+09:"],
    ]
    assert lines[1].endswith("!") and not lines[0].endswith("!")
    assert tables.count([row, row]).startswith("6 bars, 4 missed; 2 comparisons, ")


def test_table_of_marks_a_comparison_that_we_lose():
    """In the cell, and counted; every number is of the fastest call."""
    row = {"case": "c", "ms": 2.0, "bars": []}
    row["baselines"] = {"slow": {"ms": 8.0, "times": 4.0}, "fast": {"ms": 1.0, "times": 0.5}}
    row["baselines"]["equal"] = {"ms": 2.0, "times": 1.0}
    columns, (cells,) = tables.table_of([row])
    assert dict(zip(columns, cells, strict=True)) == {
        "case": "c",
        "ms": "2",
        "slow": "8 4x",
        "fast": "1 0.5x*",
        "equal": "2 1x",
    }
    assert tables.count([row, row]) == "0 bars, 0 missed; 6 comparisons, 2 slower than a baseline"


def test_show_colors_ratios_on_a_terminal_alone(monkeypatch, capsys):
    cells = ["8 x 8, 0.5x* of", "8 4x +-1e-06", "1 0.5x* +-1e-06", "1200 1200x"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    tables.show(["case", "slow", "fast", "slower"], [cells])
    shown = capsys.readouterr().out
    assert "8\x1b[32m 4x\x1b[0m +-1e-06" in shown
    assert "1\x1b[31m 0.5x*\x1b[0m +-1e-06" in shown
    assert "1200\x1b[32m 1200x\x1b[0m" in shown
    monkeypatch.delenv("FORCE_COLOR")
    tables.show(["case", "slow", "fast", "slower"], [cells])
    assert "\x1b" not in capsys.readouterr().out


def test_measure_gives_floors_of_products_and_errors_of_everyone():
    product = torch.ones(64, 64)
    case = _ones(
        at_least={"% of floor": 1e6},
        at_most={"MB beyond the result": 1e3},
        flops=2 * 64**3,
        product=(lambda: product @ product, 64**3),
        error=lambda found: 1 + len(found),
    )
    row = measure(case, "cpu")
    assert row["TFLOP/s"] == pytest.approx(2 * 64**3 / row["ms"] / 1e9)
    assert row["% of floor"] == pytest.approx(100 * row["TFLOP/s"] / row["matmul TFLOP/s"])
    assert row["max error"] == row["baselines"]["fill"]["error"] == 100_001
    assert [bar["pass"] for bar in row["bars"]] == [True, False]


def test_agree_tells_a_log_prob_that_is_off_from_ours():
    ours = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.5]), torch.ones(2, 3)
    error = exact_error((ours[0].double(), ours[1].double() + 1e-3))
    assert error(ours) == pytest.approx(1e-3, rel=1e-4)
    assert error((ours[0], None, None)) == 0
    for i in range(3):
        off = [x + 0.01 * (i == j) for j, x in enumerate(ours)]
        assert agree(ours, ours) and not agree(ours, tuple(off))


def test_extra_bytes_is_the_peak_not_the_result():
    def run() -> torch.Tensor:
        held = torch.ones(5_000_000)  # 20 MB, next to a second one while it is added
        return (held + 1)[:10].clone()

    assert extra_bytes(run, "cpu") == pytest.approx(40e6, rel=0.1)


def test_call_seconds_by_the_processor_leaves_out_what_others_take(monkeypatch):
    """A call that waits takes its time on the wall alone."""
    seconds = {}
    for name, clock in CLOCKS.items():
        monkeypatch.setattr("benchmarks.measure.clock", clock)
        seconds[name] = call_seconds(lambda: sleep(0.05), "cpu", 0, least=1)
    assert seconds["processor"][0] < 0.04 < 0.05 <= seconds["wall"][0]


def test_lognormal_sums_to_what_was_asked():
    lengths = lognormal(512, 16384, 1_216_000)
    assert len(lengths) == 512
    assert min(lengths) >= 1
    assert max(lengths) == 16384
    assert sum(lengths) == pytest.approx(1_216_000, rel=1e-3)


@pytest.mark.parametrize("name", TRAINERS)
def test_TRAINERS_without_parallelism_take_the_real_tokens(name):
    batch = torch.arange(2 * 5 * 3 * 2, dtype=torch.uint8).view(2, 5, 3, 2)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    out = TRAINERS[name](batch, mask, torch.int32, (1, 0, 1, 0))
    assert out.dtype == torch.int32
    assert torch.equal(out, batch[mask].permute(1, 0, 2).int())


def test_table_of_and_plot_hold_every_row(tmp_path):
    row = measure(_ones(), "cpu")
    columns, cells = tables.table_of([row, {**row, "case": "again", "baselines": {}}])
    assert columns[0] == "case"
    assert columns[-1] == "fill"
    assert [len(c) for c in cells] == [len(columns)] * 2
    assert cells[1][0] == "again"
    assert cells[1][-1] == ""
    assert f"\n{tables.markdown(columns, cells)}".count("\n| ") == 4
    report = json.loads(json.dumps(dict(family="f", device="d", rows=[row])))
    plot(report, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_of_errors_holds_every_case(tmp_path):
    rows = [{**measure(_ones(error=lambda found: 1e-6), "cpu"), "case": f"{i}"} for i in range(4)]
    plot(dict(family="f", device="d", rows=rows), tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"


def test_run_each_times_no_family_whose_tests_fail(monkeypatch, capfd):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--maxfail=1 -k no_test_has_this_name")
    monkeypatch.chdir(ROOT)
    assert run.run_each(["gather_routes"], ["gather_routes", "--threads", "1"]) == 1
    shown = capfd.readouterr()
    assert "gather_routes: its tests fail, so it is not timed" in shown.out
    assert "all 1 families: 0 bars, 0 missed; 0 comparisons" in shown.out
    assert shown.err.endswith("failed, see above: gather_routes\n")


def _ones(**bars) -> Case:
    return Case(
        "ones",
        lambda: torch.ones(100_000),
        {"fill": lambda: torch.empty(100_000).fill_(1)},
        moved=400_000,
        written=400_000,
        **bars,
    )
