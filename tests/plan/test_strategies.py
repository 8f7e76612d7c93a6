"""`--lengths`: schedules of given samples against loops over their rows; pictures; refusals."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from pyrl_ext.pack.schedule import Scheduler, plan_dynamic_cp
from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.cp_groups import cp_groups
from pyrl_ext.plan.forecast.cp_costs import costs_of
from pyrl_ext.plan.forecast.lengths_file import read_lengths
from pyrl_ext.plan.forecast.strategies import Comparison
from pyrl_ext.plan.show.html.charts import Box
from pyrl_ext.plan.show.html.page import plan_page
from pyrl_ext.plan.show.strategies import (
    compare,
    print_strategies,
    sentences,
    strategies_block,
)
from pyrl_ext.plan.show.summary import facts
from pyrl_ext.rollout.recorded import Recorder
from pyrl_ext.samples import Sample
from pyrl_ext.schedule.alignment import alignment
from pyrl_ext.schedule.cp_problem import CostModel, Exchange
from tests.helpers.plan_pages import REPOSITORY, checked, plan_of
from tests.helpers.tiny import one_rank, tiny_plan

LONG = str(REPOSITORY / "configs/glm47_long.yaml")
NODES = ("parallel.dp=8", "parallel.cp=2", "parallel.dynamic_cp=8", "hardware.gpus_per_node=4")

TENSOR = (
    "parallel.tp=2",
    "parallel.dp=2",
    "parallel.dynamic_cp=4",
    "parallel.ep=4",
    "batching.tokens_per_microbatch=32k",
)


def lengths(number: int, seed: int = 0, most: int = 120_000) -> list[int]:
    draw = random.Random(seed)
    return [1 + min(most - 1, int(draw.lognormvariate(9, 1.2))) for _ in range(number)]


def compared(rows: list[int], *overrides: str) -> Comparison:
    plan = compile_plan(LONG, overrides)
    return Comparison(plan, rows, [i % plan.world_size for i in range(len(rows))])


@pytest.mark.parametrize("overrides", [(), NODES, TENSOR])
def test_strategies_are_priced_as_a_loop_over_rows_does(overrides):
    """Makespan, balance, padding, tokens and moved bytes, from the schedule and the samples."""
    rows = lengths(70)
    found = compared(rows, *overrides)
    plan = found.plan
    model = found.costs.model
    tp = plan.parallel.tp
    cp = plan.parallel.cp
    per_node = plan.hardware.gpus_per_node
    ranks = plan.parallel.dp * cp
    for each in found.strategies:
        makespan = work = padded = moved = away = shared = 0.0
        tokens = [0] * ranks
        for groups in each.microbatches:
            assert [r for g in groups for r in range(g.first, g.first + g.cp_size)] == [
                *range(ranks)
            ]
            slowest = 0.0
            for first, size, samples in groups:
                launch, token, square = model.rates(size)
                time = launch if samples else 0.0
                for sample in samples:
                    align = alignment(tp, size)
                    n = -(-rows[sample] // align) * align
                    time += token * n + square * n * n
                    padded = padded + n
                    shared = shared + size * rows[sample]
                    for rank in range(first, first + size):
                        tokens[rank] += n // size
                        for part in range(tp):
                            here = rank * tp + part
                            owner = found.owners[sample]
                            routers = len(plan.router_layers) * plan.sizes.topk
                            bytes_ = rows[sample] / size * (4 + 4 + 1 + 4 + 4 + (1 + routers) / tp)
                            moved += bytes_ * (here != owner)
                            away += bytes_ * (here // per_node != owner // per_node)
                slowest = max(slowest, time)
                work = work + time * size
            makespan += slowest + model.launch_seconds
        assert sorted(i for g in each.microbatches for p in g for i in p.samples) == [*range(70)]
        assert each.makespan == pytest.approx(makespan)
        mean = work / ranks + model.launch_seconds * len(each.microbatches)
        assert each.imbalance == pytest.approx(makespan / mean)
        assert each.padded == padded and each.tokens == (min(tokens), max(tokens))
        assert each.padding == pytest.approx(1 - sum(rows) / padded)
        assert each.cp_size == pytest.approx(shared / sum(rows))
        assert (each.moved, each.away) == (round(moved), round(away))
        limit = plan.batching.tokens_per_microbatch
        assert all(
            sum(-(-rows[i] // alignment(tp, size)) for i in samples) * alignment(tp, size)
            <= limit * size
            for groups in each.microbatches
            for _, size, samples in groups
        )
    assert found.best.makespan == min(each.makespan for each in found.strategies)


def test_strategies_dynamic_wins_where_one_sample_is_long():
    """One sample needs eight ranks; first fit keeps the order of the file."""
    found = compared([120_000, *[2000] * 400], *NODES)
    first, balanced, dynamic = found.strategies
    assert found.fixed.size == 8 and found.best is dynamic
    assert dynamic.cp_size < balanced.cp_size == 8
    assert dynamic.makespan < 0.95 * balanced.makespan
    placed = [i for groups in first.microbatches for g in groups for i in g.samples]
    assert placed == sorted(placed)


def test_strategies_first_fit_puts_each_sample_into_the_first_bin_with_room():
    rows = lengths(50, seed=4)
    found = compared(rows, *NODES)
    (first, *_), fixed = found.strategies, found.fixed
    groups = [g for each in first.microbatches for g in each]
    bin_of = {i: number for number, g in enumerate(groups) for i in g.samples}
    held = [0] * len(groups)
    for sample, length in enumerate(rows):
        n = -(-length // fixed.unit) * fixed.unit
        roomy = [number for number, load in enumerate(held) if load + n <= fixed.limit]
        assert bin_of[sample] == roomy[0]
        held[roomy[0]] += n


def test_costs_of_a_plan_are_those_of_its_forecast():
    """On a GPU the seconds of an update's passes; without one, model operations."""
    from pyrl_ext.plan.forecast.compute_time import Passes
    from pyrl_ext.plan.forecast.hardware import gpu_of
    from pyrl_ext.plan.forecast.workload import Bin, step_samples

    plan = compile_plan(LONG)
    costs = costs_of(plan)
    gpu = gpu_of(plan)
    samples = step_samples(plan)
    assert gpu is not None and costs.unit == "s"
    share = sum(s.response for s in samples) / sum(s.rows for s in samples)
    for cp in (1, 2, 8):
        n = 4096
        launch, token, square = costs.model.rates(cp)
        of = Bin(n, n * (n + 1) // 2, round(share * n))
        chunks = [chunk for stage in plan.stages for chunk in stage]
        run = Passes(plan, gpu)
        seconds = sum(run.seconds(c, cp, of, w) for c in chunks for w in ("forward", "backward"))
        ours = costs.model.launch_seconds + launch + token * n + square * n * n
        assert ours == pytest.approx(seconds, rel=1e-3)
    assert costs_of(plan_of("tiny")).unit == "FLOP"


MEASURED = (
    "cp_cost.token_seconds=2e-6",
    "cp_cost.square_seconds=3e-11",
    "cp_cost.launch_seconds=0.004",
    "cp_cost.exchanges=[[2, 0.001, 4e-7, 0], [8, 0.002, 5e-7, 2e-12]]",
)


def test_costs_of_a_plan_are_the_measured_ones_if_it_has_some():
    """In the planner of a run, in the comparison, and on the page; not otherwise."""
    rows = lengths(60)
    plan = compile_plan(LONG, MEASURED)
    exchanges = Exchange(2, 0.001, 4e-7, 0), Exchange(8, 0.002, 5e-7, 2e-12)
    cost = CostModel(2e-6, 3e-11, 0.004, exchanges)
    assert costs_of(plan).model == cost
    parallel = plan.parallel
    asked = plan_dynamic_cp(
        rows,
        parallel.dp * parallel.cp,
        plan.batching.tokens_per_microbatch,
        cost=cost,
        min_cp_size=parallel.cp,
        max_cp_size=parallel.dynamic_cp,
    )
    assert Scheduler(plan).schedule(rows) == asked
    measured = compared(rows, *MEASURED)
    estimated = compared(rows)
    assert measured.strategies[-1].makespan == pytest.approx(asked.makespan)
    told = {True: "as measured, cp_cost", False: "on H200, as in the plan"}
    for each in (measured, estimated):
        text = " ".join(sentences(each, "x"))
        assert (told[each is measured] in text) and (told[each is estimated] not in text)
    origins = [dict(facts(compile_plan(LONG, more)))["cp costs"] for more in (MEASURED, ())]
    assert origins == ["measured, cp_cost", "estimated for H200; cp_cost would hold measured ones"]
    assert "cp costs" not in dict(facts(plan_of("tiny")))


def test_compare_refuses_groups_that_were_not_measured(tmp_path: Path):
    path = tmp_path / "lengths.txt"
    path.write_text("5\n7\n")
    exchanges = "cp_cost.exchanges=[[2, 0.001, 4e-7, 0]]"
    plan = plan_of("tiny", "parallel.dp=4", MEASURED[0], exchanges)
    with pytest.raises(ConfigError, match=r"a group has 4 ranks, expected at most 2.*cp_cost"):
        compare(plan, str(path))


def test_compare_refuses_groups_if_none_were_measured(tmp_path: Path):
    """Communication that was not measured is not free."""
    path = tmp_path / "lengths.txt"
    path.write_text("5\n7\n")
    with pytest.raises(ConfigError, match="a group has 2 ranks, expected at most 1"):
        compare(plan_of("tiny", "parallel.dp=4", MEASURED[0]), str(path))


def test_cp_groups_pad_for_tiles_of_8_bit_products():
    cost = CostModel(1.0, 1.0)
    plain = compile_plan(LONG)
    tiles = compile_plan(LONG, ["model.backend=te", "model.dtype=bfloat16", "model.fp8=blockwise"])
    for plan, tile in ((plain, 1), (tiles, 8)):
        units = [each.unit for each in cp_groups(plan, cost).sizes]
        assert units == [alignment(1, size, tile) for size in (2, 4, 8)]
    assert alignment(1, 2, 8) > alignment(1, 2)


# Files -------------------------------------------------------------------------------------------


def sample(tokens: int, prompt: int) -> Sample:
    mask = torch.arange(tokens) > 0
    return Sample(
        prompt_id=prompt,
        index=0,
        tokens=torch.arange(tokens),
        prompt_len=1,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens),
        route_mask=torch.zeros(tokens, dtype=torch.bool),
        routes=None,
        layer_ids=(),
        weight_version=0,
        finish_reason="stop",
        reward=0.0,
    )


def test_read_lengths_reads_every_kind_of_file(tmp_path: Path):
    (tmp_path / "a.txt").write_text("3\n\n 14 \n15\n")
    (tmp_path / "a.json").write_text("[3, 14,\n 15]")
    recorder = Recorder(tmp_path / "run", one_rank(tiny_plan()))
    recorder.save(0, [sample(9, 0)])
    recorder.save(1, [sample(4, 7), sample(15, 7), sample(16, 9)])
    for name in ("a.txt", "a.json", "run", "run/step-000001.safetensors"):
        found = read_lengths(str(tmp_path / name), 2)
        assert [each.rows for each in found] == [3, 14, 15]
        prompts = [each.prompt for each in found]
        assert prompts[0] == prompts[1] != prompts[2]
    assert [each.line for each in read_lengths(str(tmp_path / "a.txt"), 1)] == [1, 3, 4]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "3\nx\n0\n", r"a.txt:2: 'x', expected a whole number of tokens, at least 1\n"),
        ("a.txt", "3\nx\n0\n", r"a.txt:3: 0, expected a whole number of tokens, at least 1$"),
        ("a.txt", "3\n-1\n", r"a.txt:2: '-1', expected"),
        ("a.txt", "3\n4.5\n", r"a.txt:2: '4.5', expected"),
        ("a.txt", "", r"a.txt: 0 lengths, expected 1 to"),
        ("a.txt", "5\n999999\n", r"a.txt:2: 999999 tokens, expected at most 131072: the largest"),
        ("a.json", "[3,\n4,\ntrue]", r"a.json:3: true, expected a whole number"),
        ("a.json", "[3,\n4.5]", r"a.json:2: 4.5, expected a whole number"),
        ("a.json", "[3,\n4,,]", r"a.json:2: .*, expected a JSON list of lengths"),
        ("a.json", '[3, "4"]', r"a.json:1: item 1 is '4', expected"),
        ("a.safetensors", "short", r"a.safetensors: unreadable header .* rollout.record wrote"),
        ("a.safetensors", "x" * 100, r"a.safetensors: unreadable header .* rollout.record wrote"),
    ],
)
def test_main_refuses_what_is_no_length(tmp_path: Path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    assert main([LONG, "--lengths", str(tmp_path / name)]) == 2
    assert re.search(message, capsys.readouterr().err, re.MULTILINE)


def test_main_refuses_files_that_are_not_there_or_no_text(tmp_path: Path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("none", "No such file"), ("binary", "not text, expected numbers")):
        assert main([LONG, "--lengths", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"step-\*.safetensors: No such file"):
        compare(compile_plan(LONG), str(tmp_path))


# What is shown -----------------------------------------------------------------------------------


def test_main_prints_the_table_and_the_picture(tmp_path: Path, capsys):
    path = tmp_path / "lengths.json"
    page = tmp_path / "page.html"
    path.write_text(json.dumps(lengths(60)))
    assert main([LONG, "--lengths", str(path), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    comparison = compare(compile_plan(LONG), str(path))
    assert max(map(len, text.splitlines())) <= 80
    for each in comparison.strategies:
        assert each.name in text
        assert f"{each.makespan / comparison.best.makespan:.3f}x" in text
        assert f"{each.imbalance:.3f}" in text and f"{each.cp_size:.2f}" in text
    assert f"Best: {comparison.best.name}." in " ".join(text.split())
    assert len(re.findall(r"^ +rank \d+ [248·]+$", text, re.MULTILINE)) == 3 * 8
    assert page.read_text() == plan_page(comparison.plan, [strategies_block(comparison, str(path))])


def test_picture_gives_each_rank_its_time():
    """Characters of a rank's line are proportional to its seconds, to one of each microbatch."""
    from pyrl_ext.plan.show.strategies import picture

    few = compared([120_000, 40_000, 500], *NODES)
    many = compared(lengths(60), *NODES)
    for found, each in [(one, each) for one in (few, many) for each in one.strategies]:
        for label, line in picture(found, each, each.makespan, 400):
            rank = int(label.removeprefix("rank "))
            times = zip(each.microbatches, each.times, strict=True)
            busy = sum(
                time + each.launch
                for groups, of_groups in times
                for g, time in zip(groups, of_groups, strict=True)
                if g.first <= rank < g.first + g.cp_size and g.samples
            )
            drawn = sum(mark != "·" for mark in line.plain)
            assert abs(drawn - 400 * busy / each.makespan) <= len(each.microbatches)
            assert abs(len(line) - 400) <= 1


def test_strategies_block_draws_every_group(tmp_path: Path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(lengths(60)))
    comparison = compare(compile_plan(LONG), str(path))
    block = strategies_block(comparison, str(path))
    for each, chart in zip(comparison.strategies, block.charts, strict=True):
        boxes = [shape for shape in chart.shapes if isinstance(shape, Box)]
        drawn = [g for groups in each.microbatches for g in groups if g.samples]
        assert len(boxes) == len(drawn)
        ends = max(box.x + box.width for box in boxes)
        longest = max(s.makespan for s in comparison.strategies)
        assert (ends - 70) / (1180 - 90) == pytest.approx(each.makespan / longest)
        sizes = {g.cp_size for g in drawn}
        assert [words for _, words in chart.legend] == [f"cp {n}" for n in sorted(sizes)]
    page = plan_page(comparison.plan, [block])
    words = checked(page).words
    assert all(cell in words for row in block.tables[0].rows for cell in row)
    assert "Schedules" not in checked(plan_page(comparison.plan)).words


def test_print_strategies_of_many_ranks_draws_few_lines():
    from rich.console import Console

    plan = compile_plan(LONG, ["parallel.dp=64", "parallel.cp=2", "parallel.dynamic_cp=8"])
    comparison = Comparison(plan, lengths(300), [i % plan.world_size for i in range(300)])
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        print_strategies(comparison, "x", console)
    assert capture.get().count(" to 127 ") == 3 and len(capture.get().splitlines()) < 80


def test_fixed_takes_the_whole_grid_where_the_largest_group_does_not_divide_it():
    layout = ("parallel.dp=12", "parallel.dynamic_cp=8", "batching.tokens_per_microbatch=16")
    plan = compile_plan(REPOSITORY / "configs/tiny.yaml", [*layout, "batching.prompts=24"])
    comparison = Comparison(plan, [100, 3, 5, 7] * 6, [0] * 24)
    assert comparison.fixed.size == 12  # 100 rows need 8 of the 12 ranks
    dynamic = comparison.strategies[-1]
    assert {g.cp_size for groups in dynamic.microbatches for g in groups} <= {1, 2, 4, 8}
