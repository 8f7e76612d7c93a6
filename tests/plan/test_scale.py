"""`--scale`: the counts against ranks that run and megatron's groups, and how they are shown."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pyrl_ext.pack import exchange
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.scale import (
    EXCHANGE_PARTS,
    GROWING,
    WORLDS,
    Row,
    World,
    scale,
)
from pyrl_ext.plan.forecast.workload import Sample
from pyrl_ext.plan.show.html.page import plan_page
from pyrl_ext.plan.show.scale import print_scale, scale_block
from tests.helpers.plan_pages import REPOSITORY, checked, plan_of
from tests.scale import LAYOUTS, compare

pytestmark = pytest.mark.multiprocess

CONFIGS = ("tiny", "glm47", "glm47_355b", "qwen3_30b", "deepseek_v3")


def test_World_counts_what_ranks_do(tmp_path: Path):
    """`make scale` does it on 2, 4 and 8 ranks."""
    for each in compare(2, tmp_path):
        assert each.agrees, each
    assert {2, 4, 8} <= LAYOUTS.keys()


GROUPS = """\
import sys, json, torch.distributed as dist
from datetime import timedelta
from torch.testing._internal.distributed.fake_pg import FakeStore
from pyrl_ext.parallel.groups import GroupMaker, make_groups
from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.groups import groups_of
path, world, *overrides = sys.argv[1:]
made, new_group = [], dist.new_group
def counted(ranks, **named):
    made.append(len(ranks))
    return new_group(ranks, **named)
dist.new_group = counted
plan = compile_plan(path, overrides)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(world))
maker = GroupMaker(1, timedelta(minutes=1))
maker.make_listed(groups_of(plan, 0))
make_groups(maker, plan.grids["llm"])
print(json.dumps(made))
"""


def test_World_counts_the_groups_of_512_ranks():
    """As rank 0 of 512, over torch's backend that communicates with nobody."""
    layout = ("parallel.tp=2", "parallel.pp=2", "parallel.cp=2", "parallel.dp=64", "parallel.ep=4")
    path = str(REPOSITORY / "configs/tiny.yaml")
    command = [sys.executable, "-c", GROUPS, path, "512", *layout]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    made = json.loads(run.stdout.splitlines()[-1])
    world = World.of(compile_plan(path, layout), 512, False, [])
    assert world is not None
    assert world.groups == made
    assert world.group_entries == sum(made) + 512


def test_scale_makes_as_many_groups_however_many_ranks_there_are():
    """On eight ranks, those of a layer's experts are all: one group. The others are that of each
    rank alone, and that of the four ranks that hold an engine."""
    (row,) = [row for row in scale(plan_of("glm47")) if row.name == "groups that it makes"]
    assert row.values == (3, 5, 5, 5)


@pytest.mark.parametrize("ranks", ["own", "shared"])
def test_World_grows_an_encoder_beside_the_language_model(ranks: str):
    """Its ranks are no engines; rank 0 shares two groups with all ranks at either end of the edge,
    and one with those that a module's weights go out to."""
    dp = 8 if ranks == "own" else 1
    words = (f"modules.vision.ranks={ranks}", f"modules.vision.parallel.dp={dp}")
    plan = compile_plan(REPOSITORY / "configs/qwen3_vl_30b.yaml", words)
    assert plan.parallel.world_size == 32
    world = World.of(plan, 128, False, [Sample(3, 5)] * 1024)
    assert world is not None and world.llm_ranks == 128
    assert world.ranks == (128 + 32 if ranks == "own" else 128)
    bare = World.of(plan.model_copy(update={"modules": {}}), 128, False, [Sample(3, 5)] * 1024)
    assert bare is not None and bare.generated_bytes == world.generated_bytes
    grids = world.plan.grids
    readers = [r for r in grids["llm"].ranks if grids["llm"].place(r).pp == 0]
    edge = len({*readers, *(r for r in grids["vision"].ranks)})
    outward = [1 + 32, 1 + 128] if ranks == "own" else [1 + 64]  # stage 1 lacks the tower
    assert world.groups == [*bare.groups, *outward, edge, edge]


def test_World_counts_the_groups_of_dynamic_context_parallelism():
    # the two ranks of an engine are a group of context parallelism, too
    plan = compile_plan(REPOSITORY / "configs/glm47_long.yaml", ["rollout.tp=2"])
    assert (plan.parallel.cp, plan.parallel.dynamic_cp) == (2, 8)
    fixed = plan.model_copy(
        update={"parallel": plan.parallel.model_copy(update={"dynamic_cp": None})}
    )
    more, less = (World.of(each, 64, False, []) for each in (plan, fixed))
    assert more is not None and less is not None
    assert more.groups == [*less.groups, 4]  # that of 8 ranks is one with ep's
    assert more.group_entries == less.group_entries + 4


def test_World_knows_the_parts_of_an_exchange():
    assert EXCHANGE_PARTS == exchange.PARTS


def test_World_counts_the_ids_of_a_kept_set_by_its_shard():
    split = ("parallel.tp=2", "parallel.pp=2")
    samples = (Sample(3, 9), Sample(3, 5))
    plan = plan_of("tiny", *split)
    kept = plan_of("tiny", *split, "rollout.top_k=50")
    full = World(plan, samples)
    cut = World(kept, samples)
    assert cut.row_bytes(0) == full.row_bytes(0)
    assert cut.row_bytes(1) == full.row_bytes(1) + 4 + 4 * 25
    assert cut.generated_bytes - full.generated_bytes == pytest.approx(full.rows / 4 * 204)
    note = "without a top_k: the sets that are kept"
    open_ended = plan_of("tiny", "rollout.top_p=0.9")
    assert note in " ".join(open_ended.notes) and note not in " ".join(kept.notes)


def test_World_counts_the_bytes_of_a_batch_row_by_row():
    """Two hosts of 8 ranks, tp 2 x pp 2: a loop over the rows and fields of the fullest rank."""
    plan = plan_of("tiny", "parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "parallel.ep=2")
    samples = [Sample(3, 5 + i % 7) for i in range(64)]
    world = World.of(plan, 16, False, samples)
    assert world is not None and world.plan.parallel.dp == 4
    routers = plan.router_layers
    topk = plan.sizes.topk
    stages = [[layer for chunk in stage for layer in chunk.layers] for stage in plan.stages]
    computed = generated = 0.0
    for sample in samples:
        for _row in range(sample.rows):
            computed += max(
                (4 + 4 + 1 + (4 + 4) * last + (1 + topk * held) / 2) / 4
                for last, held in enumerate(map(len, map(set(routers).intersection, stages)))
            )
            generated += (4 + 4 + 1 + 4 + 4 + 1 + topk * len(routers)) / 16
    assert world.batch_bytes == pytest.approx(computed + generated)
    assert world.exchange_bytes == pytest.approx(computed / 2)  # the other half is on this host


@pytest.mark.parametrize("name", CONFIGS)
def test_scale_says_why_a_number_grows(name: str):
    """Nothing that a rank holds or reads in a second grows with the ranks but by its logarithm, or
    it is one of these."""
    allowed = {
        ("host memory of a rank", "~ schedule"),
        ("host memory of a rank", "~ ranks of its groups"),
        ("the store, every second", "by all ranks"),
    }
    rows = scale(compile_plan(REPOSITORY / f"configs/{name}.yaml"))
    for row in rows:
        assert len(row.why) > 20
        if row.growth == "yes" and row.part in {part for part, _ in allowed}:
            assert (row.part, row.name) in allowed, row
    read = next(row for row in rows if row.name == "read by a rank")
    assert set(read.values) <= {3, None}


@pytest.mark.parametrize(
    ("values", "growth"),
    [
        ((7, 7, 7, 7), "no"),
        ((9, 5, 3, 1), "no"),
        ((3, 6, 9, 12), "log"),
        ((3, 6, 9, 12.1), "yes"),
        ((8, 64, 512, 4096), "yes"),
        ((None, None, None, 4), "no"),
    ],
)
def test_growth_tells_the_logarithm_from_more(values, growth):
    assert Row("", "", "byte", values, "").growth == growth
    assert [math.log2(ranks) for ranks in WORLDS] == [3, 6, 9, 12]


def test_scale_leaves_out_ranks_that_the_layout_does_not_fit():
    plan = plan_of("tiny", "parallel.tp=4", "parallel.pp=4", "parallel.dp=4")
    for row in scale(plan):
        assert row.values[0] is None and None not in row.values[1:]


def test_scale_with_a_growing_batch_keeps_a_rank_constant():
    plan = plan_of("glm47")
    rows = {(row.part, row.name, row.unit): row for row in scale(plan)}
    batch = rows["host memory of a rank" + GROWING, "rows of the batch", "byte"]
    assert len({round(value or 0) for value in batch.values}) == 1
    fixed = rows["host memory of a rank", "rows of the batch", "byte"]
    assert fixed.values[0] == batch.values[0] and fixed.growth == "no"
    growing = [row for row in scale(plan) if row.part.endswith(GROWING)]
    for row in growing:
        assert row.values != rows[row.part.removesuffix(GROWING), row.name, row.unit].values
    assert growing == [*scale(plan)][-len(growing) :]


def test_print_scale_and_page_show_every_number(capsys):
    plan = plan_of("glm47")
    console = Console(width=150, color_system=None)
    with console.capture() as capture:
        print_scale(plan, console)
    text = capture.get()
    words = checked(plan_page(plan, [scale_block(plan)])).words
    for row in scale(plan):
        for value in row.values:
            assert value is not None
            power = next(p for p in range(5) if value < 1000 * 1024**p)
            shown = f"{value / 1024**power:.3g} " if row.unit == "byte" else f"{round(value):,}"
            if row.unit != "byte" and value >= 1e6:
                shown = f"{value / 1e6:.3g}M"
            assert shown in text and any(word.startswith(shown) for word in words)
        assert row.why in words
    assert "By number of ranks" not in checked(plan_page(plan)).words
    assert main([plan.source, "--scale"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80 and "\u2026" not in narrow
    whole = " ".join(narrow.split())
    assert all(row.why in whole for row in scale(plan) if row.growth == "yes")
