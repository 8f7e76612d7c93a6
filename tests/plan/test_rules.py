"""Rules of the plan against what they speak about: megatron-core's config and its asserts, the
layout of packed sequences, and the page of error messages."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import MLATransformerConfig

from pyrl_ext.megatron.config import LOCAL_FIELDS, _common, transformer_config
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.plan import ConfigError, compile_plan
from pyrl_ext.plan.__main__ import main
from pyrl_ext.plan.compile import draft_of, load
from pyrl_ext.plan.language.errors import fields_of, show
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.plan.rules._rule import unfit_for_heads
from pyrl_ext.plan.rules.passthrough import engine_arguments, field_names, megatron_fields
from pyrl_ext.schedule.alignment import alignment
from pyrl_ext.schedule.cp_sizes import cp_sizes
from tests.helpers.configs import REPOSITORY, hf_of, write_sizes
from tests.helpers.tiny import one_rank

TINY, QWEN3, GLM47 = (REPOSITORY / f"configs/{n}.yaml" for n in ("tiny", "tiny_qwen3", "glm47"))
SFT = REPOSITORY / "configs/tiny_sft.yaml"
# Fields that megatron-core makes anew for every config.
CALLABLES = {"init_method", "output_layer_init_method", "embedding_init_method"}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)  # messages show paths from here


def problems_of(path: Path, *overrides: str) -> list[str]:
    """Messages without their place."""
    try:
        compile_plan(path, overrides)
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    return []


# What is passed on to megatron-core --------------------------------------------------------------


def grouped_fields() -> Iterator[str]:
    for group, held in megatron_fields().items():
        for each in held:
            yield from each["fields"] if group == "breaking" else [each]


def test_megatron_fields_has_every_field_once():
    named = sorted(grouped_fields())
    assert named == sorted(field.name for field in fields(MLATransformerConfig))
    assert set(named) == field_names()


def keys_of_the_plan() -> set[str]:
    sections = fields_of()
    return {*sections, *(f"{name}.{key}" for name in sections for key in fields_of(name))}


def test_megatron_fields_and_engine_keys_name_keys_of_the_plan():
    assert {*megatron_fields()["plan"].values()} <= keys_of_the_plan()
    named = " and ".join(engine_arguments()["plan"].values()).split(" and ")
    assert {*named} - {"model.config"} <= keys_of_the_plan()


def megatron_config(config: Path, *overrides: str) -> Any:
    plan = compile_plan(config, overrides)
    return transformer_config(plan, one_rank(plan))


def test_transformer_config_takes_passed_on_fields_and_keeps_the_rest():
    names = {field.name for field in fields(MLATransformerConfig)} - CALLABLES
    plain = megatron_config(TINY)
    passed = {"moe_router_dtype": "fp64", "deterministic_mode": True, "batch_p2p_sync": True}
    config = megatron_config(TINY, *(f"model.megatron.{k}={show(v)}" for k, v in passed.items()))
    changed = {n: v for n in names if (v := getattr(config, n)) != getattr(plain, n)}
    assert changed == passed


def test_megatron_fields_refuse_what_the_trainer_sets():
    """Fields that the trainer sets are refused, except those of rounding or speed alone."""
    tree = ast.parse("\n".join(map(inspect.getsource, (transformer_config, _common))))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    given |= LOCAL_FIELDS.keys()
    for config in sorted(REPOSITORY.glob("configs/*/config.json")):
        hf = json.loads(config.read_text(encoding="utf-8"))
        if read_sizes(hf).state_mixer is None:  # the trainer builds no such layers yet
            given |= set(read_sizes(hf).megatron_config())
    assert {"calculate_per_token_loss", "moe_router_topk", "moe_router_dtype"} <= given
    assert given <= field_names()
    free = {"moe_router_dtype", "batch_p2p_sync", "bias_dropout_fusion"}
    assert given & {*megatron_fields()["free"]} == free


# Plans that hold, against megatron-core's own asserts --------------------------------------------

MODULES = ("[core_attn,moe]", "[core_attn]", "[moe]", "[moe_act]", "[core_attn,moe_act]")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([TINY, QWEN3]),
    st.fixed_dictionaries(
        {
            **{f"parallel.{axis}": st.integers(1, 4) for axis in ("dp", "tp", "pp", "cp", "ep")},
            "parallel.etp": st.sampled_from(["null", 1, 2]),
            "parallel.vpp": st.sampled_from(["null", 2]),
            "parallel.account_for_loss_in_pipeline_split": st.sampled_from(["off", "on"]),
        }
    ),
    st.sampled_from(["none", "full", *MODULES]),
)
def test_transformer_config_takes_every_plan_that_the_rules_accept(
    config: Path, values: dict[str, object], recompute: str
):
    overrides = [f"{key}={value}" for key, value in values.items()]
    if recompute in MODULES:
        overrides += ["model.recompute=selective", f"model.recompute_modules={recompute}"]
    else:
        overrides.append(f"model.recompute={recompute}")
    if not problems_of(config, *overrides):  # about one in five
        megatron_config(config, *overrides)


@pytest.mark.parametrize(
    ("dp", "cp", "sizes"),
    [
        *[(2, 1, [2]), (4, 1, [2, 4]), (6, 1, [2, 4, 6]), (12, 1, [2, 4, 8, 12])],
        *[(1, 3, []), (2, 3, [6]), (4, 3, [6, 12]), (3, 2, [4, 6])],
    ],
)
def test_compile_plan_takes_the_dynamic_cp_of_the_planners_groups(dp, cp, sizes):
    layout = (f"parallel.dp={dp}", f"parallel.cp={cp}", "batching.prompts=32")
    fits = [
        size
        for size in range(1, dp * cp + 3)
        if not problems_of(TINY, *layout, f"parallel.dynamic_cp={size}")
    ]
    assert fits == sizes == cp_sizes(dp * cp, cp)[1:]


def test_compile_plan_takes_fewer_samples_than_ranks_that_may_share_them():
    own = ("batching.samples=1", "batching.minibatches=1", "parallel.dp=4")
    assert not problems_of(SFT, *own, "parallel.dynamic_cp=4")
    (problem,) = problems_of(SFT, *own, "parallel.dynamic_cp=2")
    assert "(1 samples / 1), expected at least 2: dp * cp over the largest cp; a replica" in problem
    assert len(problems_of(SFT, *own)) == 1


@pytest.mark.parametrize("tile", [1, 8, 32])
def test_alignment_equals_the_layouts(tile: int):
    """The part of every tensor-parallel rank is whole tiles, also where 16 rows have many ranks."""
    for tp, cp, rows in product((1, 2, 3, 8), (1, 2, 3, 4, 6), (1, 15, 16, 17, 100)):
        unit = alignment(tp, cp, tile)
        layout = TokenLayout((rows,), cp, tp, align=unit)
        assert layout.padded_seqlens == (-(-rows // unit) * unit,)
        assert layout.num_local // tp % tile == 0


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 8, 12, 16])
def test_unfit_for_heads_accepts_divisors_and_multiples(tp: int):
    """Ranks share a key/value head as well as they hold several."""
    grouped = draft_of(load(QWEN3))
    latent = draft_of(load(TINY))
    grouped.learn(grouped.hf | {"num_key_value_heads": 4})
    problem = unfit_for_heads(grouped, tp, "why")
    assert (problem is None) == (tp in (1, 2, 4, 8, 12, 16))
    assert unfit_for_heads(latent, tp, "why") is None


@pytest.mark.parametrize(("steps", "minibatches"), [(1, 1), (3, 2)])
def test_compile_plan_refuses_a_warmup_beyond_the_last_update(steps: int, minibatches: int):
    updates = steps * minibatches
    run = (f"steps={steps}", f"batching.minibatches={minibatches}")
    plan = compile_plan(TINY, [*run, f"optimizer.warmup_steps={updates}"])
    assert plan.optimizer.warmup_steps == updates
    (found,) = problems_of(TINY, *run, f"optimizer.warmup_steps={updates + 1}")
    assert f"{updates + 1}, expected at most {updates}, the optimizer steps of the run" in found


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], None),
        (["model.mtp=false"], "model.mtp false, expected true"),
        (["rollout.engine_options.speculative_config={method: ngram}"], "expected one of them"),
        (["rollout.top_k=8"], "does not report them for drafted tokens"),
        (["lora.rank=8", "lora.publish=adapter"], "Use lora.publish: merge"),
        (["rollout.servers=[http://localhost:8000]"], None),
        (["rollout.gpus=8"], None),
    ],
)
def test_compile_plan_refuses_drafts_that_the_engine_cannot_make(more: list[str], says: str | None):
    mtp = [] if "model.mtp=false" in more else ["model.mtp=true"]
    found = problems_of(GLM47, "rollout.speculation=mtp", *mtp, *more)
    found = [each for each in found if each.startswith("mtp")]
    assert len(found) == (says is not None) and all((says or "") in each for each in found)


def test_compile_plan_refuses_drafts_of_a_family_that_was_never_compared():
    run = ("model.mtp=true", "rollout.speculation=mtp")
    found = problems_of(REPOSITORY / "configs/qwen3_next_80b.yaml", *run)
    assert any("with model.family qwen3_next" in each for each in found)


@pytest.mark.parametrize(
    ("config", "more", "says"),
    [
        ("glm47", [], None),
        ("glm47", ["rollout.servers=[http://localhost:8000]"], None),
        ("glm47", ["lora.rank=8", "lora.publish=merge"], None),
        ("glm47", ["rollout.dtype=float32"], "rollout.dtype float32, expected bfloat16"),
        ("glm47", ["lora.rank=8", "lora.publish=adapter"], "adapters in the engine"),
        ("glm47_355b", ["rollout.tp=8"], "width of shared experts 1536 (configs/glm47_355b"),
        ("glm47_355b", ["rollout.tp=4"], None),
        ("glm47", ["hardware.gpu=A100"], "hardware.gpu A100, expected one of H100"),
        ("glm47", ["rollout.engine=hf"], "only vllm would read it"),
        ("qwen3_vl_30b", [], "with model.family qwen3_vl_moe, which has a vision tower"),
        ("qwen3_next_80b", [], "with model.family qwen3_next, whose layers carry states"),
    ],
)
def test_compile_plan_refuses_weights_that_were_never_quantized(
    config: str, more: list[str], says: str | None
):
    file = REPOSITORY / f"configs/{config}.yaml"
    found = problems_of(file, "rollout.quantization=fp8", *more)
    found = [each for each in found if each.startswith("'fp8'") or each.startswith("fp8 ")]
    assert len(found) == (says is not None) and all((says or "") in each for each in found)


# Notes -------------------------------------------------------------------------------------------


def test_compile_plan_notes_experts_on_several_nodes():
    note = "ep 16 * etp 1 = 16 ranks are more than hardware.gpus_per_node 8"
    plan = compile_plan(GLM47, ["parallel.dp=16", "parallel.ep=16"])
    assert any(note in found for found in plan.notes)
    assert not any("per_node" in found for found in compile_plan(GLM47).notes)


def test_compile_plan_notes_a_padded_vocabulary(tmp_path: Path):
    overrides = [write_sizes(tmp_path, hf_of() | {"vocab_size": 130}), "parallel.tp=4"]
    note = "does not divide vocab_size 130: embedding and head are padded to 132 columns"
    assert any(note in found for found in compile_plan(TINY, overrides).notes)


# The page of errors ------------------------------------------------------------------------------

PAGE = (REPOSITORY / "configs/ERRORS.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```\n\$ python -m pyrl_ext\.plan ([^\n]*)\n(.*?)\n```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_main_prints_what_the_page_of_errors_shows(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
):
    assert main(command.split()) == 2
    assert capsys.readouterr().err.strip() == shown


def test_main_is_shown_every_mistake_of_the_page_of_errors():
    assert len(SHOWN) == PAGE.count("\n## ") == 4
