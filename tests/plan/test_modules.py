"""Plans with an encoder: its sizes, memory and schedule against tables of weights and longer
pipelines, and what commands show of it."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.models import family
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.encoder import Encoder
from pyrl_ext.plan.forecast.memory import StageMemory, stage_memory
from pyrl_ext.plan.forecast.pipeline_schedule import Ahead, Slot, ahead_of, pipeline
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.forecast.suggest import suggest
from pyrl_ext.plan.plan import PartialPlan
from pyrl_ext.plan.schema import Parallel
from tests.helpers.vision import KIMI_VL, QWEN_VL

QWEN3_VL = Path(__file__).parents[2] / "configs/qwen3_vl_30b.yaml"


def plan_of(*overrides: str) -> Plan:
    return compile_plan(QWEN3_VL, overrides)


def encoder_of(hf: dict[str, Any], pp: int) -> Encoder:
    """The encoder of a small model; only its sizes are asked for."""
    plan = plan_of("modules.vision.parallel.pp=2").model_copy(update={"hf": hf})
    vars(plan).pop("sizes", None)
    parallel = plan.modules["vision"].parallel.model_copy(update={"pp": pp})
    module = plan.modules["vision"].model_copy(update={"parallel": parallel})
    model = plan.model.model_copy(update={"family": hf["model_type"]})
    changed = {"modules": {"vision": module}, "model": model}
    return Encoder(plan.model_copy(update=changed), "vision")


@pytest.mark.parametrize("hf", [QWEN_VL, KIMI_VL], ids=["qwen3_vl_moe", "kimi_k25"])
def test_encoder_has_the_parameters_of_the_table_of_weights(hf: dict[str, Any]):
    tower = family(hf["model_type"]).tower
    assert tower is not None
    for pp in (1, 2):
        encoder = encoder_of(hf, pp)
        table = tower.weights(encoder.plan.sizes)
        number = sum(math.prod(shape) for weight in table for shape in weight.shapes)
        assert sum(encoder.parameters(stage).total for stage in range(pp)) == number


# Both pipelines on one timeline ------------------------------------------------------------------


def end_of(slots: list[Slot]) -> float:
    return max(slot.end for slot in slots)


@pytest.mark.parametrize(("before", "pp"), [*product((1, 2, 3), (1, 2, 4))])
def test_pipeline_with_an_encoder_is_as_fast_as_one_that_is_longer(before: int, pp: int):
    """With stages that all take the same, an encoder is like so many more stages of one model."""
    ahead = Ahead(before, ahead_of(Parallel(pp=pp)), 1.0, 2.0)
    for number in (1, 3, 8):
        joined = pipeline(pp, 1, number, 1.0, 2.0, encoder=ahead)
        assert end_of(joined) == end_of(pipeline(before + pp, 1, number, 1.0, 2.0))
        assert len(joined) == 2 * number * (before + pp)


def test_pipeline_waits_for_a_slow_encoder_and_not_for_a_fast_one():
    alone = end_of(pipeline(2, 1, 8, 1.0, 2.0))
    ends = {
        pace: end_of(pipeline(2, 1, 8, 1.0, 2.0, encoder=Ahead(1, 2, pace, 2 * pace)))
        for pace in (0.01, 1.0, 5.0)
    }
    assert alone < ends[0.01] < alone + 0.1
    assert ends[1.0] == alone + 3
    assert ends[5.0] == 8 * 15


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (2, None), (4, None), (2, 2), (4, 3)])
@pytest.mark.parametrize("before", [1, 2])
def test_in_flight_is_what_the_schedule_keeps(pp: int, vpp: int | None, before: int):
    parallel, number = Parallel(pp=pp, vpp=vpp), 8 * pp
    ahead = Ahead(before, ahead_of(parallel), 1.0, 2.0)
    slots = pipeline(pp, vpp or 1, number, 1.0, 2.0, encoder=ahead)
    for stage in range(before):
        held = most = 0
        for slot in (slot for slot in slots if slot.rank == stage - before):
            held += 1 if slot.kind == "F" else -1
            most = max(most, held)
        assert most == ahead_of(parallel) + before - stage
        assert sum(slot.rank == stage - before for slot in slots) == 2 * number


def test_pipeline_of_a_frozen_encoder_has_no_backward_passes():
    slots = pipeline(2, 2, 4, 1.0, 2.0, encoder=Ahead(2, 5, 1.0, None))
    assert {slot.kind for slot in slots if slot.rank < 0} == {"F"}
    assert len(slots) == 2 * 4 + 2 * 2 * 2 * 4
    forward = pipeline(2, 1, 4, 1.0, None, encoder=Ahead(1, 2, 1.0, 2.0))
    assert end_of(forward) == 6 and {slot.kind for slot in forward} == {"F"}


# Memory and time ---------------------------------------------------------------------------------


def of_vision(plan: Plan) -> list[StageMemory]:
    return [stage for stage in stage_memory(plan) if stage.module == "vision"]


def test_stage_memory_holds_what_an_encoder_trains():
    (stage,) = of_vision(plan_of())
    number = 538_631_408  # of Qwen3VLMoeVisionModel in transformers 5.19
    held = [stage.bytes_of(name) for name in ("weights", "gradients", "optimizer")]
    assert held == [2 * number, 4 * number, 12 * -(-number // 8)]
    (frozen,) = of_vision(plan_of("modules.vision.train=off"))
    assert {item.name for item in frozen.items}.isdisjoint({"gradients", "optimizer"})
    assert frozen.bytes_of("activations") == 0 and frozen.peak < stage.peak / 2


def test_stage_memory_counts_the_microbatches_that_an_encoder_runs_ahead():
    (stage,) = of_vision(plan_of())  # pp 2: two ahead, and the one at work
    (alone,) = of_vision(plan_of("parallel.pp=1"))
    assert stage.bytes_of("activations") == 3 * alone.bytes_of("activations") // 2
    (more,) = of_vision(plan_of("modules.vision.patches_per_microbatch=32k"))
    assert more.bytes_of("activations") == 2 * stage.bytes_of("activations")
    stages = of_vision(plan_of("modules.vision.parallel.dp=4", "modules.vision.parallel.pp=2"))
    assert [s.stage for s in stages] == [2, 3] and stages[0].name == "stage 2 (vision)"


def test_step_time_has_what_the_language_model_waits():
    def waited(*overrides: str) -> float:
        time = step_time(plan_of(*overrides))
        assert time is not None
        return sum(cost.seconds for cost in time.costs if cost.name == "wait for vision")

    images = "estimate.images=20"
    assert waited(images) > 10 * waited() > 0
    assert waited(images, "modules.vision.train=off") < waited(images)
    assert waited(images, "modules.vision.parallel.dp=16") < waited(images)


# Ranks, files and commands -----------------------------------------------------------------------


def test_compile_plan_puts_an_encoder_behind_the_language_model():
    plan = plan_of(*(f"modules.vision.parallel.{axis}=2" for axis in ("dp", "tp", "pp")))
    assert plan.world_size == 40 and list(plan.grids) == ["llm", "vision"]
    assert list(plan.grids["vision"].ranks) == [*range(32, 40)]
    derived = json.loads(plan.to_json())["derived"]
    assert derived["groups"]["vision"]["tp"] == [[32, 33], [34, 35], [36, 37], [38, 39]]
    assert Plan.from_json(plan.to_json()) == plan


def test_check_resumes_with_other_ranks_of_an_encoder_and_not_as_another_run():
    plan = plan_of()
    free = "modules.vision.parallel.dp=16", "modules.vision.patches_per_microbatch=8k"
    assert plan_of(*free).diff(plan) == ()
    assert [each.name for each in plan_of("modules.vision.lr=1e-3").diff(plan)] == [
        "modules.vision.lr"
    ]


def test_partial_plan_changed_reaches_into_modules():
    source = {"modules": {"vision": {"parallel": {"dp": 2}, "patches_per_microbatch": 4}}}
    plan = PartialPlan.of("/a.yaml", source, set())
    other = plan.changed({("modules", "vision", "parallel", "dp"): 3})
    assert other.modules["vision"].parallel.dp == 3 and other.modules["vision"].train
    assert plan.modules["vision"].parallel.dp == 2


def test_engine_of_rank_leaves_out_ranks_of_an_encoder():
    plan = compile_plan(QWEN3_VL)
    assert plan.engine_of_rank == (*(rank // plan.rollout.tp for rank in range(32)), *[None] * 8)
    assert plan.unsupported == ()
    apart = plan.model_copy(
        update={"rollout": plan.rollout.model_copy(update={"gpus": 8, "tp": 4, "sleep": False})}
    )
    assert [r for r, e in enumerate(apart.engine_of_rank) if e is not None] == [0, 16]


def test_compile_plan_names_the_encoder_that_a_family_lacks(tmp_path: Path):
    text = QWEN3_VL.read_text().replace("qwen3_vl_30b/", f"{QWEN3_VL.parent}/qwen3_vl_30b/")
    text = text.replace("data/", f"{QWEN3_VL.parent}/data/")
    start, end = text.index("modules:"), text.index("batching:")
    (tmp_path / "a.yaml").write_text(text[:start] + text[end:])
    assert any("expected vision" in each for each in compile_plan(tmp_path / "a.yaml").unsupported)


def test_suggest_divides_the_gpus_between_both_grids():
    pinned = ["parallel.tp=1", "parallel.pp=2", "parallel.cp=1", "parallel.vpp=null"]
    images = ["estimate.images=8", "parallel.etp=null"]
    found = suggest(QWEN3_VL, [*pinned, *images], 20, "H100", most=2).found
    assert found and all(each.plan.world_size == 20 for each in found)
    assert any("modules.vision.parallel.dp=" in text for each in found for text in each.overrides)
