"""Plans with an encoder: its sizes, memory and schedule against tables of weights and longer
pipelines, and what commands show of it."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.forecast.compute_time import Spent, encoder_seconds
from pyrl_ext.plan.forecast.encoder import EncoderForecast, encoders
from pyrl_ext.plan.forecast.memory import StageMemory, stage_memory
from pyrl_ext.plan.forecast.rounds import update_rounds
from pyrl_ext.plan.forecast.step_time import step_time
from pyrl_ext.plan.forecast.suggest import suggest
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.model.hardware import gpu_of
from pyrl_ext.plan.plan import PartialPlan
from pyrl_ext.plan.schema import Parallel
from pyrl_ext.schedule.pipeline import EncoderPipeline, PipelineSlot, ahead_of, pipeline
from tests.helpers.configs import CONFIGS
from tests.helpers.plan_pages import time_of
from tests.helpers.vision import KIMI_VL, QWEN_VL, pixels_of, rows_of

pytestmark = pytest.mark.multiprocess

QWEN3_VL = CONFIGS / "qwen3_vl_30b.yaml"


def plan_of(*overrides: str) -> Plan:
    return compile_plan(QWEN3_VL, overrides)


def encoder_of(hf: dict[str, Any], pp: int) -> EncoderForecast:
    """The encoder of a small model; only its sizes are asked for."""
    plan = plan_of("modules.vision.parallel.pp=2").model_copy(update={"hf": hf})
    vars(plan).pop("sizes", None)
    parallel = plan.modules["vision"].parallel.model_copy(update={"pp": pp})
    module = plan.modules["vision"].model_copy(update={"parallel": parallel})
    model = plan.model.model_copy(update={"family": hf["model_type"]})
    changed = {"modules": {"vision": module}, "model": model}
    return EncoderForecast(plan.model_copy(update=changed), "vision")


def test_compile_refuses_an_encoder_of_a_model_of_text():
    with pytest.raises(ConfigError, match=r"modules.vision: not a module of .*, expected none"):
        compile_plan(QWEN3_VL.with_name("glm47.yaml"), ["modules.vision.train=false"])


@pytest.mark.parametrize("hf", [QWEN_VL, KIMI_VL], ids=["qwen3_vl_moe", "kimi_k25"])
def test_encoder_has_the_parameters_of_the_table_of_weights(hf: dict[str, Any]):
    sizes = read_sizes(hf)
    assert isinstance(sizes, VisionLanguage)
    shapes = [shape for weight in sizes.tower_weights() for shape in weight.shapes]
    number = sum(map(math.prod, shapes))
    for pp in (1, 2):
        encoder = encoder_of(hf, pp)
        assert sum(encoder.parameters(stage).total for stage in range(pp)) == number


@pytest.mark.parametrize("hf", [QWEN_VL, KIMI_VL], ids=["qwen3_vl_moe", "kimi_k25"])
def test_encoder_flops_equal_torchs_count(hf: dict[str, Any]):
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(json.loads(json.dumps(hf)))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    grids = [(1, 4, 6), (1, 6, 4), (1, 2, 12)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        rows_of(model, pixels_of(hf, grids), grids)
    for pp in (1, 2):
        encoder = encoder_of(hf, pp)
        estimate = encoder.plan.estimate.model_copy(update={"image_patches": 24})
        encoder = EncoderForecast(encoder.plan.model_copy(update={"estimate": estimate}), "vision")
        ours = 3 * 24 * encoder.patch_flops
        assert ours == counter.get_total_flops()


# Both pipelines on one timeline ------------------------------------------------------------------


def end_of(slots: list[PipelineSlot]) -> float:
    return max(slot.end for slot in slots)


@pytest.mark.parametrize(("before", "pp"), [*product((1, 2, 3), (1, 2, 4))])
def test_pipeline_with_an_encoder_is_as_fast_as_one_that_is_longer(before: int, pp: int):
    """With stages that all take the same, an encoder is like so many more stages of one model."""
    ahead = EncoderPipeline(before, ahead_of(pp, None), 1.0, 2.0)
    for number in (1, 3, 8):
        joined = pipeline(pp, 1, number, 1.0, 2.0, encoder=ahead)
        assert end_of(joined) == end_of(pipeline(before + pp, 1, number, 1.0, 2.0))
        assert len(joined) == 2 * number * (before + pp)


def test_pipeline_waits_for_a_slow_encoder_and_not_for_a_fast_one():
    alone = end_of(pipeline(2, 1, 8, 1.0, 2.0))
    ends = {
        pace: end_of(pipeline(2, 1, 8, 1.0, 2.0, encoder=EncoderPipeline(1, 2, pace, 2 * pace)))
        for pace in (0.01, 1.0, 5.0)
    }
    assert alone < ends[0.01] < alone + 0.1
    assert ends[1.0] == alone + 3
    assert ends[5.0] == 8 * 15


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (2, None), (4, None), (2, 2), (4, 3)])
@pytest.mark.parametrize("before", [1, 2])
def test_in_flight_is_what_the_schedule_keeps(pp: int, vpp: int | None, before: int):
    parallel = Parallel(pp=pp, vpp=vpp)
    number = 8 * pp
    ahead = EncoderPipeline(before, ahead_of(parallel.pp, parallel.vpp), 1.0, 2.0)
    slots = pipeline(pp, vpp or 1, number, 1.0, 2.0, encoder=ahead)
    for stage in range(before):
        held = most = 0
        for slot in (slot for slot in slots if slot.rank == stage - before):
            held += 1 if slot.kind == "F" else -1
            most = max(most, held)
        assert most == ahead_of(parallel.pp, parallel.vpp) + before - stage
        assert sum(slot.rank == stage - before for slot in slots) == 2 * number


def test_pipeline_of_a_frozen_encoder_has_no_backward_passes():
    slots = pipeline(2, 2, 4, 1.0, 2.0, encoder=EncoderPipeline(2, 5, 1.0, None))
    assert {slot.kind for slot in slots if slot.rank < 0} == {"F"}
    assert len(slots) == 2 * 4 + 2 * 2 * 2 * 4
    forward = pipeline(2, 1, 4, 1.0, None, encoder=EncoderPipeline(1, 2, 1.0, 2.0))
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


def test_stage_memory_counts_what_a_publish_takes_on_every_rank():
    embedding = 151_936 * 2048 * 2
    experts = 128 * 3 * 2048 * 768 * 2
    (stage,) = of_vision(plan_of("rollout.bucket_bytes=1MiB"))  # a layer's experts in one
    assert stage.bytes_of("publish") == experts + embedding
    (stage,) = of_vision(plan_of("rollout.bucket_bytes=4GiB"))
    assert stage.bytes_of("publish") == (4 << 30) + embedding
    assert not any("engine" in item.name for item in stage.items)

    alone = "parallel.dp=8", "parallel.pp=1", "parallel.ep=1", "hardware.gpu=null"
    sends = stage_memory(plan_of(*alone, "rollout.bucket_bytes=4GiB"))[0].bytes_of("publish")
    shared = "modules.vision.ranks=shared", "modules.vision.parallel.dp=1"
    sole = stage_memory(plan_of(*alone, "rollout.bucket_bytes=4GiB", *shared))[0]
    assert sends - sole.bytes_of("publish") == (4 << 30) + experts  # vLLM keeps a layer's


def test_stage_memory_counts_communicators_between_modules():
    plan = plan_of()  # language model: a stage, a pipeline, all, and 3 of vLLM; vision: all
    held = [stage.bytes_of("CUDA and NCCL") - (1 << 30) for stage in stage_memory(plan)]
    # an edge has two; the first rank of each module sends its tensors, all others receive them
    assert held == [n << 28 for n in (6 + 2 + 2, 6 + 1, 1 + 2 + 2)]


def test_step_time_has_what_the_language_model_waits():
    def waited(*overrides: str) -> float:
        costs = time_of(plan_of(*overrides)).costs
        return sum(cost.seconds for cost in costs if cost.name == "wait for vision")

    images = "estimate.images=20"
    assert waited(images) > 10 * waited() > 0
    assert waited(images, "modules.vision.train=off") < waited(images)
    assert waited(images, "modules.vision.parallel.dp=16") < waited(images)


# On the language model's ranks -------------------------------------------------------------------

SHARED = "modules.vision.ranks=shared", "modules.vision.parallel.dp=1"


def test_compile_plan_puts_a_replica_on_every_rank_of_the_first_stage():
    sizes = ("dp=4", "tp=4", "cp=2", "pp=2", "etp=1")
    plan = plan_of(*SHARED, *(f"parallel.{size}" for size in sizes))
    grid = plan.grids["vision"]
    llm = plan.grids["llm"]
    first = [rank for rank in llm.ranks if llm.place(rank).pp == 0]
    assert list(grid.ranks) == first == [*range(32)] and plan.world_size == 64
    assert grid.groups["dp"] == (tuple(first),) and "tp" not in grid.groups
    assert Plan.from_json(plan.to_json()) == plan


def test_stage_memory_adds_an_encoder_to_the_first_stage():
    plan = plan_of(*SHARED)
    own = of_vision(plan_of())[0]
    first, last = stage_memory(plan)
    alone, other = stage_memory(plan_of())[:2]
    number = 538_631_408
    held = [first.bytes_of(f"{name} of vision") for name in ("weights", "gradients", "optimizer")]
    assert held == [2 * number, 4 * number, 12 * -(-number // 16)]  # spread over the first stage
    two = first.bytes_of("activations of vision")
    three = own.bytes_of("activations")
    assert 3 * two == 2 * three  # pp 2: two in flight, and none ahead
    mine = sum(item.bytes for item in first.items if item.name.endswith("of vision"))
    mine += first.bytes_of("patches") + first.bytes_of("patches of the batch")
    everything = [
        sum(item.bytes for item in stage.items if item.name != "CUDA and NCCL")
        for stage in (first, alone)
    ]
    assert everything[0] - mine == everything[1] and last.peak == other.peak
    # each image in 8 bits, on one rank: 512 samples x 2304 patches x 1536 bytes over 16 ranks
    assert first.bytes_of("patches of the batch") == 512 * 2304 * 1536 // 16


def test_stage_memory_offloads_an_encoder_with_the_trainer():
    away = "rollout.offload_trainer=all"
    for stage, of in ((stage_memory(plan_of(*SHARED, away))[0], " of vision"),
                      (of_vision(plan_of(away))[0], "")):  # fmt: skip
        items = {item.name: item for item in stage.items}
        for name in ("weights", "optimizer"):
            on_device = items[f"{name}{of}"]
            on_host = items[f"{name}{of} on the host"]
            assert "rollout" not in on_device.phases and "rollout" in on_host.phases
            assert on_device.bytes == on_host.bytes
        assert "rollout" not in items[f"gradients{of}"].phases
        assert f"gradients{of} on the host" not in items  # their contents are dropped


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (2, None), (4, None), (2, 2), (4, 3)])
def test_in_flight_of_a_shared_encoder_is_what_the_first_chunk_keeps(pp: int, vpp: int | None):
    overrides = f"parallel.pp={pp}", f"parallel.vpp={vpp or 'null'}", "hardware.gpu=null"
    (encoder,) = encoders(plan_of(*SHARED, *overrides))
    held = most = 0
    inside = EncoderPipeline(0, ahead_of(pp, vpp), 1.0, 2.0)
    for slot in pipeline(pp, vpp or 1, 8 * pp, 1.0, 2.0, encoder=inside):
        if slot.rank == slot.chunk == 0:
            held += 1 if slot.kind == "F" else -1
            most = max(most, held)
            assert slot.end - slot.start == (2.0 if slot.kind == "F" else 4.0)
        else:
            assert slot.end - slot.start == (1.0 if slot.kind == "F" else 2.0)
    assert encoder.in_flight(0) == most


def costs_of(*overrides: str) -> dict[tuple[str, str], Spent]:
    return {(cost.phase, cost.name): cost for cost in time_of(plan_of(*overrides)).costs}


@pytest.mark.parametrize("train", [True, False])
def test_step_time_has_a_shared_encoder_inside_the_first_stage(train: bool):
    """Without stages that hide it, every pass takes the encoder's part longer."""
    pinned = *SHARED, "parallel.pp=1", "estimate.images=3", f"modules.vision.train={train}".lower()
    plan = plan_of(*pinned)
    (encoder,), gpu = encoders(plan), gpu_of(plan)
    assert gpu is not None
    passes = 4 if train else 1  # recompute full
    for phase, times in (("old_logprobs", 1), ("update", passes)):
        rounds = sum(len(part) for part in update_rounds(plan))
        # 512 samples of 3 images of 2304 patches, whole images on each of 16 replicas
        most = 2304 * math.ceil(512 * 3 / rounds / 16)
        cost = costs_of(*pinned)[phase, "vision"]
        took = encoder_seconds(encoder, gpu, most, 0)
        assert cost.seconds == pytest.approx(times * rounds * took)
        assert cost.amount == pytest.approx(times * rounds * most * encoder.patch_flops)


def test_step_time_of_a_shared_encoder_lengthens_the_pipeline_by_its_stage():
    images = "estimate.images=20"
    several = costs_of(*SHARED, images)
    few = costs_of(*SHARED)
    assert several["update", "vision"].seconds > 10 * few["update", "vision"].seconds > 0
    none = costs_of(*SHARED, "estimate.images=0")
    own = costs_of("estimate.images=0", "parallel.dp=16")
    assert ("update", "vision") not in none and ("update", "wait for vision") not in own
    for name in ("reduce gradients", "gather weights", "optimizer"):  # 0.5B parameters more
        assert few["update", name].seconds > costs_of()["update", name].seconds


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("ranks", [(), SHARED], ids=["own", "shared"])
def test_step_time_moves_every_row_of_an_image_there_and_its_gradient_back(
    ranks: tuple[str, ...], train: bool
):
    costs = costs_of(*ranks, "estimate.images=3", f"modules.vision.train={train}".lower())
    # 512 samples of 3 images of 2304 / 4 rows; an embedding and three features of 2048, in bf16
    whole = 512 * 3 * (2304 // 4) * 4 * 2048 * 2
    each = whole / 8 if not ranks else whole / 16 * 15 / 16
    assert costs["old_logprobs", "rows of images"].amount == pytest.approx(each)
    update = costs["update", "rows of images"]
    assert update.amount == pytest.approx(each * (2 if train else 1)) and update.seconds > 0


def test_plan_command_shows_a_shared_encoder(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main([str(QWEN3_VL), *SHARED, "--html", str(tmp_path / "a.html")]) == 0
    shown = capsys.readouterr().out
    page = (tmp_path / "a.html").read_text()
    assert "first stage" in shown and "(vision)" not in shown
    assert "weights of vision" in page


@pytest.mark.parametrize("ranks", [(), SHARED], ids=["own", "shared"])
def test_step_time_of_text_alone_is_that_without_encoders(ranks: tuple[str, ...]):
    plan = plan_of(*ranks, "estimate.images=0")
    costs, bare = (step_time(each) for each in (plan, plan.model_copy(update={"modules": {}})))
    assert costs is not None and bare is not None
    ours = [c for c in costs.costs if "vision" in c.name or "images" in c.name]
    assert not ours and costs.seconds("old_logprobs") > 0
    assert costs.seconds("old_logprobs") == bare.seconds("old_logprobs")
    assert costs.model_flops == bare.model_flops
    more = {c.name for c in costs.costs if c.phase == "update"} ^ {
        c.name for c in bare.costs if c.phase == "update"
    }
    assert not more


def test_notes_tell_of_images_longer_than_prompts():
    assert not [note for note in plan_of().notes if "images" in note]
    (note,) = (each for each in plan_of("estimate.images=4").notes if "images" in each)
    assert "2,304 rows of images" in note and "1,024" in note  # 4 x 2304 patches, 2 x 2 a row


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
    start = text.index("modules:")
    end = text.index("batching:")
    (tmp_path / "a.yaml").write_text(text[:start] + text[end:])
    assert any("expected vision" in each for each in compile_plan(tmp_path / "a.yaml").unsupported)


def test_suggest_keeps_the_ranks_of_an_encoder():
    found = suggest(QWEN3_VL, ["parallel.tp=2", "parallel.cp=1", "parallel.pp=2"], 24, "H100").found
    assert found
    for each in found:
        assert each.plan.world_size == 24 and len(each.plan.grids["vision"].ranks) == 8
