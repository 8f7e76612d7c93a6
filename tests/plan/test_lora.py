"""The section `lora`: an optional section of the language, and what a plan says of adapters."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pyrl_ext.models.lora_table import adapter_table
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.flops import update_flops
from pyrl_ext.plan.forecast.memory import stage_memory
from pyrl_ext.plan.forecast.parameters import (
    published,
    published_factors,
    rank_parameters,
    trained_of_stage,
)
from pyrl_ext.plan.forecast.step_time import StepTime
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.model.lora import factors
from pyrl_ext.plan.schema.lora import Lora
from tests.helpers.configs import REPOSITORY, hf_of, problems_of
from tests.helpers.plan_pages import time_of

TINY = REPOSITORY / "configs/tiny.yaml"
ON = ("lora.rank=8", "lora.alpha=16")


def test_compile_plan_takes_an_optional_section_and_leaves_it_out(tmp_path: Path):
    assert compile_plan(TINY).lora is None
    parent = tmp_path / "parent.yaml"
    parent.write_text(f"extends: {TINY}\nlora: {{rank: 8, expert_rank: 4, alpha: 16}}\n")
    plan = compile_plan(parent, ["lora.alpha=32"])
    lora = plan.lora
    assert lora is not None
    assert (lora.rank_of(False), lora.rank_of(True)) == (8, 4)
    assert (lora.scale_of(False), lora.scale_of(True)) == (4, 8)
    assert Plan.from_json(plan.to_json()) == plan
    assert compile_plan(parent, ["lora=null"]).lora is None
    child = tmp_path / "child.yaml"
    child.write_text("extends: parent.yaml\nlora: null\n")
    assert compile_plan(child).lora is None


def test_diff_of_plans_names_what_lora_changes():
    plain = compile_plan(TINY)
    tuned = compile_plan(TINY, ON)
    assert "lora.rank: 8 now, null in the saved plan" in [str(d) for d in tuned.diff(plain)]
    assert not tuned.diff(compile_plan(TINY, [*ON, "lora.publish=merge"]))


# Factors ----------------------------------------------------------------------------------------

# A config of every family, and what is smaller than in it, so that its table is short
SMALL = {"num_hidden_layers": 3, "vocab_size": 64}
EXPERTS = {"n_routed_experts": 4, "num_experts": 4, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "configs/tiny/config.json": {},
    "configs/tiny_qwen3/config.json": {},
    "configs/deepseek_v3/config.json": {"first_k_dense_replace": 1} | EXPERTS,
    "configs/moonlight/config.json": EXPERTS,
    "configs/glm47_355b/config.json": {"first_k_dense_replace": 1} | EXPERTS,
    "configs/tiny_vl/config.json": {},
    "configs/tiny_qwen3_next/config.json": {},
    "configs/tiny_nemotron/config.json": {},
    "configs/mixtral_8x7b/config.json": {"num_local_experts": 4},
    "tests/plan/broken_configs/dense.json": {},
    "tests/plan/broken_configs/kimi_k25_mtp.json": {},
}


def small_of(config: str) -> dict[str, Any]:
    hf = json.loads((REPOSITORY / config).read_text())
    return hf | (SMALL | FAMILIES[config] if FAMILIES[config] else {})


def counted(sizes: Any, lora: Lora, mtp: int, stacked: tuple[str, ...] = ()) -> tuple[int, int]:
    """(numbers, tensors) of all factors; those that are `stacked` on others are no tensors."""
    kinds = [*sizes.layer_kinds, *[sizes.mtp_kind] * mtp]
    every = [factor for kind in kinds for factor in factors(sizes, lora, kind)]
    return sum(f.numbers * f.tensors for f in every), sum(
        f.tensors for f in every if f.name not in stacked
    )


@pytest.mark.parametrize("config", FAMILIES)
def test_factors_are_those_of_the_weight_table(config: str):
    hf = small_of(config)
    sizes = read_sizes(hf)
    mtp = sizes.num_nextn_predict_layers
    base = sizes.weights(mtp)
    lists = ("all", ["q_proj", "kv_b_proj", "down_proj"], ["gate", "up_proj", "v_proj"])
    for targets, experts in product(lists, ("per_expert", "shared_outer", "none")):
        lora = Lora.model_validate(
            {"rank": 4, "expert_rank": 2, "alpha": 8, "targets": targets, "experts": experts}
        )
        shapes = [shape for row in adapter_table(base, lora) for shape in row.shapes]
        assert counted(sizes, lora, mtp) == (sum(map(math.prod, shapes)), len(shapes))


def test_factors_of_published_models_are_as_many_as_their_tensors_say():
    """GLM-4.7-Flash and Qwen3-30B-A3B at rank 16; linears that megatron fuses have one B."""
    stacked = "k_proj.lora_B", "v_proj.lora_B", "up_proj.lora_B"
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    cases = [
        ("glm47", {}, 536.0, 15_425),
        ("glm47", {"experts": "none"}, 29.5, 705),
        ("glm47", {"targets": attention}, 21.0, 470),
        ("qwen3_30b", {}, 843.8, 31_008),
    ]
    for name, given, millions, tensors in cases:
        sizes = read_sizes(hf_of(name))
        numbers, number = counted(sizes, Lora(rank=16, alpha=16, **given), 0, stacked)
        assert (round(numbers / 1e6, 1), number) == (millions, tensors)


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer", "none"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 4)], ids=str)
def test_trained_parameters_of_a_rank_are_the_parts_of_the_weight_table(
    layout: tuple[int, int, int], experts: str
):
    tp, etp, ep = layout
    split = [f"parallel.tp={tp}", f"parallel.etp={etp}", f"parallel.ep={ep}", "parallel.dp=4"]
    plan = compile_plan(TINY, [*ON, *split, f"lora.experts={experts}"])
    assert plan.lora is not None
    table = adapter_table(plan.sizes.weights(0), plan.lora)
    dense = sum(math.prod(row.shard_shape(tp)) for row in table if row.expert is None)
    expert = sum(math.prod(row.shard_shape(etp)) for row in table if row.expert is not None)
    found = rank_parameters(plan, trained_of_stage(plan, 0))
    assert found == (dense, expert // ep)


# Forecast ---------------------------------------------------------------------------------------

GLM47_LORA = REPOSITORY / "configs/glm47_lora.yaml"
ONE = ("parallel.dp=1", "parallel.ep=1", "rollout.tp=1", "rollout.sleep=true")
FULL = ("lora=null", f"hardware.memory={10**12}")
MERGED = ("lora.publish=merge", "lora.targets=all")


def test_stage_memory_has_gradients_and_optimizer_state_of_adapters_alone():
    plan = compile_plan(GLM47_LORA, ["objective.kl_coef=0.1"])
    (stage,) = stage_memory(plan)
    base = stage_memory(compile_plan(GLM47_LORA, FULL))[0].bytes_of("weights")
    adapters = rank_parameters(plan, trained_of_stage(plan, 0)).total
    assert stage.bytes_of("weights") == base + 2 * adapters
    assert stage.bytes_of("gradients") == 4 * adapters
    assert adapters < 0.02 * base
    assert "reference" not in [item.name for item in stage.items]  # the base without adapters


def test_configs_with_adapters_fit_their_gpus():
    """Two H100 as eight; one does not hold the base twice, one H200 does in turns."""
    for path in (GLM47_LORA, REPOSITORY / "configs/qwen3_30b_lora.yaml"):
        assert not any("out of memory" in note for note in compile_plan(path).notes)
    two = compile_plan(GLM47_LORA, ["parallel.dp=2", "parallel.ep=2", "rollout.tp=2"])
    assert not any("out of memory" in note for note in two.notes)
    away = "rollout.offload_trainer=all"
    needs = "a rank needs 113.5 GiB in phase publish (weights 56.76 GiB + engine weights 56.76 GiB)"
    assert any(needs in each for each in problems_of(GLM47_LORA, *ONE, away))
    one = compile_plan(GLM47_LORA, [*ONE, away, "hardware.gpu=H200"])
    assert not any("out of memory" in note for note in one.notes)
    assert any("keeps no weights, so every publish sends all" in note for note in one.notes)


def test_published_numbers_are_the_factors_or_what_they_change():
    """GLM-4.7-Flash at rank 16; an engine that sleeps keeps nothing, vLLM takes whole layers."""
    plan = compile_plan(GLM47_LORA)
    total = published(compile_plan(GLM47_LORA, FULL)).numbers
    assert published(plan).numbers == published_factors(plan).numbers < total / 50
    for sleeps in (False, True):
        asleep = compile_plan(GLM47_LORA, [f"rollout.sleep={str(sleeps).lower()}"])
        assert published(asleep).numbers == published_factors(plan).numbers + sleeps * total
    remote = "rollout.servers=[http://127.0.0.1:8001]"  # it may have been started again
    whole = parameters(read_sizes(hf_of()))
    for publish in ("merge", "adapter"):
        plan = compile_plan(TINY, [*ON, f"lora.publish={publish}", remote])
        factors_sent = published_factors(plan).numbers * (publish == "adapter")
        assert published(plan).numbers == whole.total + factors_sent
    tables = 2 * 154_880 * 2048 + 2048
    assert published(compile_plan(GLM47_LORA, MERGED)) == (9491 - 3, total - tables)
    for experts, share in (("per_expert", 0.979), ("none", 0.051)):
        merged = compile_plan(GLM47_LORA, [*MERGED, f"lora.experts={experts}"])
        hf = merged.rollout.model_copy(update={"engine": "hf"})
        merged = merged.model_copy(update={"rollout": hf})
        sent = published(merged)
        assert sent.numbers / total == pytest.approx(share, abs=5e-4)
        assert (sent.tensors > 46 * 64 * 3) == (experts != "none")


def timed(*overrides: str) -> tuple[StepTime, Plan]:
    plan = compile_plan(GLM47_LORA, overrides)
    return time_of(plan), plan


def test_step_time_has_no_products_for_gradients_of_a_frozen_base():
    """With recomputation, of four passes over a linear three are left; of attention all four."""
    tuned, plan = timed()
    full, _ = timed(*FULL)

    def ratio(name: str) -> float:
        one, other = (
            sum(c.amount for c in time.costs if (c.phase, c.name) == ("update", name))
            for time in (tuned, full)
        )
        return one / other

    assert ratio("projections") == ratio("experts") == pytest.approx(3 / 4)
    assert ratio("attention") == pytest.approx(1)
    assert ratio("head") == pytest.approx(3 / 4)
    assert ratio("optimizer") < 0.1 and ratio("reduce gradients") < 0.1
    moved = [
        sum(c.seconds for c in time.costs if c.phase == "publish" and c.unit == "byte")
        for time in (tuned, full)
    ]
    assert moved[0] < moved[1] / 20
    assert 0.6 < tuned.model_flops / full.model_flops < 0.75
    assert tuned.model_flops == update_flops(plan)


def test_notes_say_what_a_merge_loses_and_why_it_is_one():
    notes = " ".join(compile_plan(GLM47_LORA, ["lora.publish=null", "lora.targets=all"]).notes)
    assert "lora.publish: merge, since an adapter would not be applied whole: kv_b_proj" in notes
    assert "steps below the rounding of a weight do not reach the engine" in notes
    assert "rounds B once more" in " ".join(compile_plan(GLM47_LORA, ["lora.alpha=24"]).notes)
    assert not any("alpha" in note for note in compile_plan(GLM47_LORA).notes)
