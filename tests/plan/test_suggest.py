"""`--suggest`: plans that hold and fit, the fastest first."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.forecast.suggest import LEFT_FREE, Search, even_layout, suggest
from pyrl_ext.plan.model.chunks import plan_stages
from pyrl_ext.plan.model.hardware import memory_limit
from pyrl_ext.plan.schema import Parallel
from tests.helpers import teachers
from tests.helpers.configs import CONFIGS

GLM47 = CONFIGS / "glm47.yaml"


@pytest.fixture(scope="module")
def eight() -> Search:
    return suggest(GLM47, (), 8, "H200")


def test_suggest_finds_plans_that_hold_and_fit(eight: Search):
    assert 1 < len(eight.found) <= 6
    for each in eight.found:
        plan = compile_plan(GLM47, each.overrides)  # every rule holds
        limit = memory_limit(plan)
        assert limit is not None
        assert limit == eight.limit and plan.world_size == 8
        assert each.peak == max(stage.peak for stage in stage_memory(plan))
        assert each.peak <= (1 - LEFT_FREE) * limit
        took = step_time(plan)
        assert took and took.total == each.time.total
    totals = [each.time.total for each in eight.found]
    assert totals == sorted(totals)
    assert eight.broken["the_model_splits_over_tp"] > 0  # 20 heads on 8 ranks
    assert eight.too_large > 0  # all experts on each of eight ranks
    given = compile_plan(GLM47)
    took = step_time(given)
    assert took and totals[0] <= took.total  # the given layout is one of them


def test_suggest_tries_the_cheapest_recomputation_first(eight: Search):
    """None where that fits, otherwise only the inputs of the experts' last products."""
    ways = {"none": 0, "selective": 1, "full": 3}
    cheap = "model.recompute_modules=[core_attn,moe_act]"
    chosen = [ways[each.plan.model.recompute] for each in eight.found]
    assert {0, 1} <= {*chosen}
    assert any(cheap in each.overrides for each in eight.found)
    for each in eight.found:
        less = {"none": [], "selective": ["none"], "full": ["none", cheap]}
        for way in less[each.plan.model.recompute]:
            how = ["model.recompute=selective", way] if way == cheap else ["model.recompute=none"]
            others = [x for x in each.overrides if not x.startswith("model.recompute")]
            peak = max(s.peak for s in stage_memory(compile_plan(GLM47, [*others, *how])))
            assert peak > (1 - LEFT_FREE) * eight.limit


def test_suggest_keeps_overrides_on_other_gpus():
    fixed = ["parallel.tp=2", "model.recompute=full"]
    search = suggest(GLM47, fixed, 16, "H100")
    assert search.found
    for each in search.found:
        assert "hardware.gpu=H100" in each.overrides
        assert not any(text.startswith(("parallel.tp=", "model.rec")) for text in each.overrides)
        plan = compile_plan(GLM47, [*fixed, *each.overrides])
        assert (plan.world_size, plan.parallel.tp, plan.model.recompute) == (16, 2, "full")


def test_suggest_keeps_a_given_memory():
    search = suggest(GLM47, ["hardware.memory=80GiB"], 16, "H200")
    assert search.limit == 80 * 2**30 and search.found
    for each in search.found:
        assert each.plan.hardware.memory == search.limit
        assert each.peak <= (1 - LEFT_FREE) * search.limit


def test_suggest_keeps_given_virtual_stages():
    search = suggest(GLM47, ["parallel.vpp=2"], 16, "H200")
    assert search.found
    for each in search.found:
        assert each.plan.parallel.vpp == 2 and len(each.plan.stages) > 1
        assert all(len(stage) == 2 for stage in each.plan.stages)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dtyp=float32", "unknown key. Did you mean model.dtype?"),
        ("batching.minibatches=3", "3 does not divide"),
        ("parallel.tp=3", "3 does not divide"),
    ],
)
def test_suggest_reports_problems_of_every_layout(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert main([str(GLM47), override, "--suggest", "12xH200"]) == 2
    told = capsys.readouterr().err
    assert f"command line: {override}: {message}" in told


def test_suggest_solves_problems_of_the_given_layout():
    with pytest.raises(ConfigError):
        compile_plan(GLM47, ["hardware.gpu=A100"])
    search = suggest(
        GLM47, ["data.max_prompt_tokens=8192", "rollout.gpu_memory_utilization=0.5"], 8, "H200"
    )
    assert search.found  # microbatches that hold the longest sample


def test_suggest_bounds_dynamic_context_parallelism():
    path = CONFIGS / "qwen3_30b.yaml"
    given = compile_plan(path).parallel.dynamic_cp
    search = suggest(path, (), 8, "H200")
    sizes = {each.plan.parallel.dynamic_cp for each in search.found}
    assert given and sizes and all(size is None or size <= min(8, given) for size in sizes)


def test_suggest_says_that_nothing_fits(capsys: pytest.CaptureFixture[str]):
    engine = ("rollout.tp=1", "rollout.gpu_memory_utilization=0.9")  # fits, the trainer does not
    assert main([str(GLM47), *engine, "--suggest", "2xA100"]) == 2
    told = capsys.readouterr().out
    assert "do not fit" in told


@pytest.mark.parametrize("wanted", ["8H200", "8xV100", "H200", ""])
def test_suggest_refuses_a_bad_argument_with_an_example(
    wanted: str, capsys: pytest.CaptureFixture[str]
):
    assert main([str(GLM47), "--suggest", wanted]) == 2
    assert capsys.readouterr().err == (
        f"command line: --suggest: {wanted!r}, expected a number and one of A100, H100, H200, "
        "B200: 8xH200\n"
    )


def test_print_suggestions_can_be_pasted(eight: Search, capsys: pytest.CaptureFixture[str]):
    assert main([str(GLM47), "--suggest", "8xH200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    pasted = [line.partition(": ")[2] for line in lines if line[:1].isdigit() and ": " in line[:4]]
    assert [tuple(shlex.split(text)) for text in pasted] == [f.overrides for f in eight.found]
    assert "never compared with a run on GPUs" in " ".join(lines)


@pytest.mark.parametrize(
    ("layers", "mtp", "stages"), [(47, 0, 4), (47, 1, 8), (61, 0, 16), (5, 0, 5)]
)
def test_even_layout_differs_by_one_layer(layers: int, mtp: int, stages: int):
    parallel = Parallel(pp=stages, pipeline_model_parallel_layout=even_layout(layers, mtp, stages))
    counts = [len(chunk.layers) for (chunk,) in plan_stages(parallel, layers, mtp)]
    assert sum(counts) == layers and max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)  # next to the loss


def test_suggest_takes_a_dense_model_without_a_key_for_replay(tmp_path: Path):
    config = tmp_path / "dense.yaml"
    text = GLM47.with_name("llama31_8b.yaml").read_text("utf-8")
    for key in ("config: llama31_8b", "prompts: data"):
        name, value = key.split(": ")
        text = text.replace(key, f"{name}: {GLM47.parent}/{value}")
    config.write_text(re.sub(r"^replay: off.*\n", "", text, flags=re.MULTILINE))
    assert suggest(config, ["parallel.pp=1", "parallel.cp=1"], 8, "H100").found


TAUGHT = ("teacher.model=zai-org/GLM-4.7", "objective.distill_coef=1")


def test_suggest_counts_the_memory_of_a_teacher():
    alone = suggest(GLM47, (), 16, "H200").found[0]
    search = suggest(GLM47, TAUGHT, 16, "H200")
    assert search.found
    for each in search.found:
        plan = compile_plan(GLM47, [*TAUGHT, *each.overrides])
        fullest = max(stage_memory(plan), key=lambda stage: stage.peak)
        assert fullest.peak == each.peak <= (1 - LEFT_FREE) * search.limit
        assert fullest.bytes_of("teacher") > 40 * 2**30  # of 657 on 16 GPUs
    with pytest.raises(
        ConfigError, match=r"a rank needs .* GiB in phase \w+ \(teacher [0-9.]+ GiB"
    ):
        compile_plan(GLM47, [*TAUGHT, *alone.overrides])


def test_suggest_says_that_a_teacher_does_not_fit(capsys: pytest.CaptureFixture[str]):
    assert main([str(GLM47), "--suggest", "8xH200"]) == 0
    capsys.readouterr()
    assert main([str(GLM47), *TAUGHT, "--suggest", "8xH200"]) == 2
    told = capsys.readouterr().out
    assert "do not fit" in told and "the smallest needs" in told


def test_suggest_takes_layouts_that_the_teacher_can_run(tmp_path: Path):
    folder = tmp_path / "teacher"
    taught = [*TAUGHT[1:], f"teacher.model={folder}"]
    fixed = ["parallel.pp=1", "parallel.cp=1"]
    without = suggest(GLM47, fixed, 16, "H200").found
    assert {each.plan.parallel.tp for each in without} > {1}
    teachers.write_dense(folder, num_attention_heads=5, num_key_value_heads=5)
    search = suggest(GLM47, [*fixed, *taught], 16, "H200")
    assert search.broken["the_teacher_runs_on_these_ranks"] > 0
    assert {each.plan.parallel.tp for each in search.found} == {1}
    # two layers are on some of several stages
    search = suggest(GLM47, ["parallel.tp=1", "parallel.cp=1", *taught], 16, "H200")
    assert {each.plan.parallel.pp for each in search.found} > {1}
