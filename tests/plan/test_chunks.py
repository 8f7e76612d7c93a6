"""The pipeline's stages are megatron's: same layers, same routers, same refusals."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pyrl_ext.plan import ConfigError, Plan, compile_plan
from pyrl_ext.plan.forecast.parameters import stage_parameters
from pyrl_ext.plan.model.chunks import ModelChunk, plan_stages, spell_out
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.plan.rules import check
from pyrl_ext.plan.rules.pipeline import layout_problem
from pyrl_ext.plan.schema import Parallel
from pyrl_ext.plan.show.summary import Summary
from tests.helpers.configs import CONFIGS

TINY = CONFIGS / "tiny/config.json"
FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"

YAML = {
    "device": "cpu",
    "steps": 1,
    "run": "runs/x",
    "batching": {"prompts": 4, "samples_per_prompt": 2, "tokens_per_microbatch": 64},
    "rollout": {"engine": "hf", "max_new_tokens": 4},
    "optimizer": {"lr": 1e-3},
    "data": {"task": "copy", "max_prompt_tokens": 8},
    "replay": {"old": False, "reference": False, "train": False},  # all layers may be dense
}

Table = list[list[tuple[ModelChunk, list[int]]]]  # [pp][vpp] of stage and its layers with routers


def model_of(kinds: list[int], mtp: int = 0) -> dict[str, Any]:
    """HF config with one layer a kind: 1 for a router, 0 for dense."""
    return json.loads(TINY.read_text()) | {
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": [("dense", "sparse")[kind] for kind in kinds],
        "first_k_dense_replace": None,
        "num_nextn_predict_layers": mtp,
    }


def compiled(folder: Path, parallel: dict[str, Any], kinds: list[int], mtp: int = 0) -> Plan:
    (folder / "config.json").write_text(json.dumps(model_of(kinds, mtp)))
    model = {"family": "glm4_moe_lite", "config": "config.json", "tokenizer": "a/b"}
    tree = YAML | {"model": model | {"mtp": mtp > 0}, "parallel": parallel}
    (folder / "plan.yaml").write_text(yaml.safe_dump(tree))
    return compile_plan(folder / "plan.yaml")


def changed(plan: Plan, parallel: dict[str, Any], kinds: list[int], mtp: int) -> Plan:
    """`plan` of another pipeline and model, not yet checked; quicker than writing it down."""
    fields = {name: getattr(plan, name) for name in Plan.model_fields} | {
        "parallel": Parallel(**parallel),
        "model": plan.model.model_copy(update={"mtp": mtp > 0}),
        "hf": model_of(kinds, mtp),
    }
    return Plan.model_construct(**fields)


def ours(plan: Plan) -> Table:
    routers = set(plan.router_layers)
    return [
        [(stage, [layer for layer in stage.layers if layer in routers]) for stage in rank]
        for rank in plan.stages
    ]


@pytest.fixture(autouse=True, scope="module")
def _megatron() -> Iterator[None]:
    """Before anything else of megatron is imported: tests after these would wait for its fusers."""
    from megatron.core import jit

    jit.disable_jit_fuser()
    yield
    on_rank(None, None, None)


def on_rank(rank: int | None, pp: int | None, vpp: int | None) -> None:
    """Let megatron answer for this pipeline rank; its layouts know no other way to ask."""
    from megatron.core import parallel_state

    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)


def megatron_config(parallel: dict[str, Any], kinds: list[int], mtp: int = 0) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=len(kinds),
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_layer_freq=kinds,
        mtp_num_layers=mtp or None,
        pipeline_model_parallel_size=parallel["pp"],
        virtual_pipeline_model_parallel_size=parallel.get("vpp"),
        pipeline_dtype=torch.float32,
        **{key: value for key, value in parallel.items() if "pipeline" in key},
    )


def theirs(parallel: dict[str, Any], kinds: list[int], mtp: int = 0) -> Table:
    """megatron's table. Raises what megatron raises, and ValueError for no partition."""
    config = megatron_config(parallel, kinds, mtp)
    pp = parallel["pp"]
    vpp = parallel.get("vpp")
    if config.virtual_pipeline_model_parallel_size != vpp:
        raise ValueError("the layout has chunks of which the plan says nothing")
    table: Table = []
    for rank in range(pp):
        on_rank(rank, pp, vpp)
        table.append([megatron_stage(config, rank, chunk) for chunk in chunks(vpp)])
    order = [table[rank][chunk][0] for chunk in range(vpp or 1) for rank in range(pp)]
    if list(chain(*(stage.layers for stage in order))) != list(range(len(kinds))):
        raise ValueError(f"megatron places layers otherwise than in order: {order}")
    if not (order[0].embedding and order[-1].loss):
        raise ValueError("megatron's schedule feeds the first stage and takes the last one's loss")
    return table


def chunks(vpp: int | None) -> list[Any]:
    return [None] if vpp is None else list(range(vpp))


def megatron_stage(config: Any, rank: int, chunk: int | None) -> tuple[ModelChunk, list[int]]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first = get_transformer_layer_offset(config, chunk, rank)
    ids = tuple(range(first, first + get_num_layers_to_build(config, chunk, rank)))
    if min(ids, default=0) < 0 or get_num_layers_to_build(config, chunk, rank) < 0:
        raise ValueError("megatron counts below 0")
    specs: Any = get_gpt_decoder_block_spec(config, False, vp_stage=chunk, pp_rank=rank)
    if len(specs.layer_specs) != len(ids):
        raise ValueError("megatron builds another number of layers than it counts")
    routers = [
        layer
        for layer, spec in zip(ids, specs.layer_specs, strict=True)
        if getattr(spec.submodules.mlp, "func", None) is MoELayer
    ]
    mtp = get_mtp_num_layers_to_build(config, chunk, rank)
    if layout := config.pipeline_model_parallel_layout:
        parts = layout.layout[rank][chunk or 0]
        return ModelChunk(LayerType.embedding in parts, ids, mtp, LayerType.loss in parts), routers
    begins = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
    ends = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
    return ModelChunk(begins, ids, mtp, ends), routers


# Generated pipelines -----------------------------------------------------------------------------


def generated(dice: random.Random) -> tuple[dict[str, Any], list[int], int]:
    """Sizes, router pattern and number of MTP layers; about half of them can be split."""
    pp = dice.randint(2, 6)
    vpp = dice.choice([None, None, 2, 3, 4])
    parallel: dict[str, Any] = {"pp": pp} | ({"vpp": vpp} if vpp else {})
    mtp = dice.choice([0, 0, 1, 2])
    each = [dice.randint(1, 3) * (vpp or 1)] * pp
    way = dice.choice(["even", "accounted", "counts", "counts", "layout", "layout", "mixed"])
    if way in ("counts", "mixed"):
        for key, rank in dice.choice([[(FIRST, 0)], [(LAST, -1)], [(FIRST, 0), (LAST, -1)]]):
            parallel[key] = each[rank] = dice.randint(1, 4) * (dice.choice([vpp, vpp, 1]) or 1)
    layers = max(1, sum(each) + dice.choice([0] * 6 + [-9, -1, 1, 2]))
    if way in ("accounted", "mixed"):
        for key in dice.choice([[EMBEDDING], [LOSS], [EMBEDDING, LOSS]]):
            parallel[key], layers = True, max(1, layers - 1)
    if way == "layout" or (way == "mixed" and dice.random() < 0.5):
        parallel[LAYOUT] = a_layout(dice, layers, mtp, pp, vpp or 1)
    if way == "mixed" and dice.random() < 0.3:
        parallel = {key: parallel[key] for key in parallel if key not in (FIRST, LAST)}
    return parallel, [dice.choice([0, 1, 1]) for _ in range(layers)], mtp


def a_layout(dice: random.Random, layers: int, mtp: int, pp: int, vpp: int) -> str:
    """A layout of random stages, spelt in a random way, sometimes with a mistake."""
    ends = sorted(dice.randint(0, layers) for _ in range(pp * vpp - 1))
    counts = [end - begin for begin, end in zip([0, *ends], [*ends, layers], strict=True)]
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    last_layers = max(i for i, count in enumerate(counts) if count)
    first = pp * (vpp - 1) + (vpp > 1)  # the ranks of the first stage hold an embedding already
    holder = dice.choice([*range(max(last_layers, first), pp * vpp), pp * vpp - 1])
    stages[holder] += "m" * mtp
    text = "|".join([*stages[:-1], stages[-1] + "L"])
    for _ in range(dice.choice([0, 0, 0, 1, 2])):
        at = dice.randrange(len(text))
        text = text[:at] + dice.choice(["t", "m", "|", "E", "L", "x", ""]) + text[at + 1 :]
        text = dice.choice([text, text[::-1], text.replace("|", "", 1)])
    for group in ("tt|", "t|", "|t"):
        if dice.random() < 0.2:
            text = text.replace(group * 2, f"({group})*2,")
    for count, letter in ((3, "t"), (2, "t"), (2, "m"), (2, "|")):
        if dice.random() < 0.4:
            text = text.replace(letter * count, f"{letter}*{count}")
    return text


def test_plan_stages_splits_generated_pipelines_as_megatron_does(tmp_path: Path):
    """Layouts that compile have megatron's stages; megatron cannot split the others."""
    dice = random.Random(5)
    seen = Counter()
    refused = 0
    base = compiled(tmp_path, {}, [0, 1])
    for _ in range(3000):
        parallel, kinds, mtp = generated(dice)
        plan = changed(base, parallel, kinds, mtp)
        if problems := list(check(plan)):
            assert all(key.startswith("parallel") for key, _ in problems)
            refused += 1
            with pytest.raises((ValueError, AssertionError, ZeroDivisionError)):
                theirs(parallel, kinds, mtp)
                pytest.fail(f"megatron splits {len(kinds)} layers by {parallel}: {problems}")
        else:
            assert ours(plan) == theirs(parallel, kinds, mtp), parallel
            seen.update([*parallel, *["mtp"] * bool(mtp), *["dense"] * (0 in kinds)])
    print(f"\n{seen['pp']} pipelines are split as by megatron, {refused} are refused: {dict(seen)}")
    assert seen["pp"] >= 1000 and refused >= 1000
    assert min(seen[key] for key in (FIRST, LAST, EMBEDDING, LOSS, LAYOUT, "vpp", "mtp")) >= 100


def test_plan_stages_reads_generated_layouts_as_megatron_does():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    dice = random.Random(6)
    read = 0
    pieces = ["E", "t", "m", "L", "|", "t*2", "|*2", ",", "(tt|)*2", "(t*3|)*12", "()*2", "(t|t)"]
    pieces += ["(E(t)*2)*2", "*", "x", "1", " ", "t*0", "(t|)*0"]
    for _ in range(4000):
        layout = "".join(dice.choices(pieces, [9] * 5 + [3] * 5 + [1] * 9, k=dice.randint(1, 8)))
        plain = spell_out(layout)
        if set(plain) <= set("EtmL|"):
            read += 1
            theirs = PipelineParallelLayerLayout.parse_str_to_list(layout)
            letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
            assert plain == "|".join("".join(letters[x.name] for x in row) for row in theirs)
    assert read >= 1000


# Named pipelines ---------------------------------------------------------------------------------


def test_plan_stages_splits_moonlight_in_two(tmp_path: Path):
    kinds = [0] + [1] * 26
    with pytest.raises(ConfigError, match=r"num_layers_in_first_pipeline_stage 13$"):
        compiled(tmp_path, {"pp": 2}, kinds)
    parallel = {"pp": 2, FIRST: 13}
    plan = compiled(tmp_path, parallel, kinds)
    assert plan.stages == (
        (ModelChunk(True, tuple(range(13)), 0, False),),
        (ModelChunk(False, tuple(range(13, 27)), 0, True),),
    )
    table = ours(plan)
    assert [len(stage[0][1]) for stage in table] == [12, 14]  # the first layer is dense
    assert table == theirs(parallel, kinds)


def test_plan_stages_reads_a_layout_with_chunks_and_an_mtp_stage():
    parallel = Parallel(pp=2, vpp=3, pipeline_model_parallel_layout="Et*3|(tt|)*2,t,||mL")
    stages = plan_stages(parallel, 8, 1)
    assert stages == (
        (
            ModelChunk(True, (0, 1, 2), 0, False),
            ModelChunk(False, (5, 6), 0, False),
            ModelChunk(False, (), 0, False),
        ),
        (
            ModelChunk(False, (3, 4), 0, False),
            ModelChunk(False, (7,), 0, False),
            ModelChunk(False, (), 1, True),
        ),
    )


def test_plan_stages_gives_one_rank_everything():
    assert plan_stages(Parallel(), 3, 1) == ((ModelChunk(True, (0, 1, 2), 1, True),),)


def test_plan_stages_refuses_a_split_that_no_rule_has_checked():
    with pytest.raises(ValueError, match=r"plan_stages: Et\|tL, expected 3 layers"):
        plan_stages(Parallel(pp=2), 3)
    negative = Parallel(pp=2, num_layers_in_first_pipeline_stage=4)  # megatron would build -1
    with pytest.raises(ValueError, match="plan_stages: Etttt"):
        plan_stages(negative, 3)


def test_get_transformer_layer_offset_divides_by_zero_where_a_rule_refuses():
    """Why a rule refuses them: when this fails, megatron-core can do it and the rule can go."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = megatron_config({"pp": 2, "vpp": 2, FIRST: 2, LAST: 2}, [1] * 4)
    with pytest.raises(ZeroDivisionError):
        get_transformer_layer_offset(config, vp_stage=0, pp_rank=1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|ttxL", "cannot read x in 'Ett|ttxL', expected the letters E t m L"),
        ("E(t|t)L", "cannot read ( ) in 'E(t|t)L', expected the letters E t m L"),
        ("Et*1000|L", "cannot read 0 in "),
        ("Ett|tt|L", "3 stages, expected pp 2 * vpp 1 = 2"),
        ("Et|t|t|tL", "4 stages, expected pp 2 * vpp 1 = 2. Use vpp 2"),
        ("Ett|tt", "0 times L, expected 1; there is one loss"),
        ("EEtt|ttL", "2 times E, expected 1; there is one embedding"),
        ("Ett|tL", "3 times t, expected 4; num_hidden_layers is 4"),
        ("Ett|ttmL", "1 times m, expected 0; 0 multi-token-prediction layers are trained"),
        ("tEt|ttL", "starts with tEt, expected E; the first stage begins with the embedding"),
        ("Ett|Ltt", "ends with Ltt, expected L; the last stage ends with the loss"),
    ],
)
def test_layout_problem_names_what_is_wrong(layout: str, message: str):
    parallel = Parallel(pp=2, pipeline_model_parallel_layout=layout)
    assert (layout_problem(parallel, 4, 0) or "no problem").startswith(message)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("|Et|tt|tmmL", "starts with |Et, expected E"),
        ("Et|t|t|mmtL", "a t after m, expected every t first"),
        ("Et|t|ttm|mL", "m in stages 3 and 4, expected one stage"),
        ("Etttt|mm||L", "m in stage 2 of 4, expected one of the last 2"),
        ("Etttt||mm|L", "m in stage 3 of 4, which is on the ranks of stage 1"),
        ("Etttt|||mmL", None),
    ],
)
def test_layout_problem_of_chunks_and_mtp(layout: str, message: str | None):
    parallel = Parallel(pp=2, vpp=2, pipeline_model_parallel_layout=layout)
    found = layout_problem(parallel, 4, 2)
    assert found is None if message is None else (found or "no problem").startswith(message)


def test_stage_counts_leave_equal_stages_names_a_count_that_fits(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"Use num_layers_in_first_pipeline_stage 12$"):
        compiled(tmp_path, {"pp": 4, FIRST: 13, LAST: 20}, [1] * 48)
    plan = compiled(tmp_path, {"pp": 4, FIRST: 12, LAST: 20}, [1] * 48)
    assert [len(stage.layers) for (stage,) in plan.stages] == [12, 8, 8, 20]
    with pytest.raises(ConfigError, match=r"or pipeline_model_parallel_layout$"):
        compiled(tmp_path, {"pp": 3, "vpp": 2}, [1] * 47)


# The messages about them -------------------------------------------------------------------------


def test_tables_show_the_stages(tmp_path: Path):
    layout = {"pp": 2, "vpp": 2, LAYOUT: "Ett|tt|t*3,|mL"}
    plan = compiled(tmp_path, layout, [0, 1, 1, 0, 1, 1, 1], mtp=1)
    (stages,) = [table for table in Summary(plan).tables() if table.title == "stages"]
    assert [row[:3] for row in stages.rows] == [
        ("stage 0", "0-1", "embedding"),
        ("stage 0", "4-6", ""),
        ("stage 1", "2-3", ""),
        ("stage 1", "none", "mtp, loss"),
    ]


@pytest.mark.parametrize(
    "split", [{FIRST: 1}, {LOSS: True}, {LAYOUT: "Ettt|L"}, {"pp": 3}, {"vpp": 2, LOSS: True}]
)
def test_stage_parameters_hold_every_parameter_once(tmp_path: Path, split: dict[str, Any]):
    plan = compiled(tmp_path, {"pp": 2} | split, [0, 1, 1])
    stages = stage_parameters(plan)
    assert len(stages) == plan.parallel.pp
    assert sum(stage.total for stage in stages) == parameters(plan.sizes).total


def test_stage_parameters_hold_a_tied_embedding_at_both_ends(tmp_path: Path):
    plan = compiled(tmp_path, {"pp": 2}, [0, 1])
    plan.hf["tie_word_embeddings"] = True
    first, last = stage_parameters(plan)
    copy = plan.sizes.vocab_size * plan.sizes.hidden_size
    assert first.total + last.total == parameters(plan.sizes).total + copy
