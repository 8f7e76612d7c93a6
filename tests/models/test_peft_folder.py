"""PEFT adapter folders: what is written comes back, foreign forms, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyrl_ext.models.lora_table import adapter_table
from pyrl_ext.models.peft_folder import CONFIG, TENSORS, read_adapter, write_adapter
from tests.helpers.tiny import CONFIG as GLM
from tests.helpers.tiny import QWEN3, tiny_plan

LORA = ("lora.rank=4", "lora.alpha=8")
EXPERTS = "base_model.model.model.layers.1.mlp.experts"
PAIR = f"{EXPERTS}.base_layer"


def table_of(plan):
    return adapter_table(plan.sizes.weights(0), plan.lora)


def random_factors(plan):
    stream = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=stream)
        for row in table_of(plan)
        for name, shape in zip(row.hf_names, row.shapes, strict=True)
    }


def written(
    folder: Path, *overrides: str, config: Path = QWEN3
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(plan, factors) of random adapters in ``folder``."""
    plan = tiny_plan(*LORA, *overrides, config=config)
    factors = random_factors(plan)
    write_adapter(folder, factors, plan)
    return plan, factors


def read(folder, plan, **ignored):
    return read_adapter(folder, plan.lora, plan.sizes, table_of(plan), ignored)


def changed(folder, tensors=None, **keys):
    """Change keys of the config, and tensors (None: left out) of the file, in ``folder``."""
    config = json.loads((folder / CONFIG).read_text()) | keys
    (folder / CONFIG).write_text(json.dumps(config))
    if tensors:
        held = load_file(folder / TENSORS) | tensors
        save_file({n: t for n, t in held.items() if t is not None}, folder / TENSORS)


@pytest.mark.parametrize(
    "config, overrides",
    [
        (GLM, ()),
        (QWEN3, ("lora.expert_rank=8",)),
        (QWEN3, ("lora.experts=shared_outer",)),
        (GLM, ("lora.experts=none",)),
        (QWEN3, ("lora.targets=[up_proj, q_proj, gate]",)),
        (GLM, ("lora.targets=[down_proj]", "lora.experts=shared_outer")),
    ],
)
def test_peft_folder_gives_back_what_was_written(config, overrides, tmp_path):
    plan, factors = written(tmp_path, *overrides, config=config)
    read_back = read(tmp_path, plan)
    assert read_back.keys() == factors.keys()
    assert all(torch.equal(read_back[name], tensor) for name, tensor in factors.items())
    experts = [n for n in load_file(tmp_path / TENSORS) if ".experts." in n]
    layers = 0 if plan.lora.experts == "none" else len(plan.router_layers)
    assert len(experts) == layers * 6 * plan.sizes.num_experts


def fuse(folder, plan, gate_and_up):
    """Write the pairs of every layer's experts as peft does: ``gate_and_up``, and random down."""
    width = plan.sizes.moe_intermediate_size
    wide = plan.sizes.num_experts * plan.lora.rank
    down = (torch.randn(wide, width), torch.randn(plan.sizes.hidden_size, wide))
    tensors: dict[str, Any] = {n: None for n in load_file(folder / TENSORS) if ".experts." in n}
    for layer in plan.router_layers:
        experts = EXPERTS.replace("layers.1.", f"layers.{layer}.")
        for module, pair in ((f"{experts}.base_layer", gate_and_up), (experts, down)):
            for letter, tensor in zip("AB", pair, strict=True):
                tensors[f"{module}.lora_{letter}.weight"] = tensor.clone()
    changed(folder, tensors)
    return down


def test_read_adapter_starts_gate_and_up_with_an_A_they_share(tmp_path):
    plan, _ = written(tmp_path)
    number = plan.sizes.num_experts
    rank = plan.lora.rank
    width = plan.sizes.moe_intermediate_size
    a = torch.randn(number * rank, plan.sizes.hidden_size)
    b = torch.randn(2 * width, rank * number)
    _, down_b = fuse(tmp_path, plan, (a, b))
    factors = read(tmp_path, plan)
    for e in range(number):
        name = f"model.layers.1.mlp.experts.{e}.{{}}_proj.lora_{{}}.weight"
        for kind, rows in (("gate", slice(0, width)), ("up", slice(width, None))):
            assert torch.equal(factors[name.format(kind, "A")], a[e * rank : (e + 1) * rank])
            assert torch.equal(factors[name.format(kind, "B")], b[rows, e::number])
        assert torch.equal(factors[name.format("down", "B")], down_b[:, e::number])


def test_peft_folder_reads_no_zero_adapters_and_none_that_are_ignored(tmp_path):
    plan, _ = written(tmp_path, "lora.targets=[q_proj]")
    base = "base_model.model.model.layers.{}.self_attn.k_proj.lora_{}.weight"
    more = {base.format(0, "A"): torch.randn(4, 64), base.format(0, "B"): torch.zeros(32, 4)}
    changed(tmp_path, more | {base.format(9, x): torch.ones(4, 4) for x in "AB"})
    with pytest.raises(
        ValueError, match=r"0 factors are missing.* 2 are unknown \['model.layers.9"
    ):
        read(tmp_path, plan)
    read(tmp_path, plan, **{r"model\.layers\.9\..*": "left out"})


def test_peft_folder_refuses_what_the_run_cannot_hold(tmp_path):
    plan, _ = written(tmp_path, "lora.targets=[q_proj, gate]")
    good = json.loads((tmp_path / CONFIG).read_text())
    for keys, match in [
        ({"use_dora": True}, "'use_dora': True"),
        ({"use_rslora": True}, "'use_rslora': True"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"bias": "all"}, "'bias': 'all'"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "LOHA"}, "peft_type is LOHA"),
        ({"a_key_of_2030": [1]}, "a_key_of_2030"),
        ({"r": "8"}, "TypeError"),
        ({"lora_alpha": 16}, "added times 4, expected 2.*Set lora.alpha to 16"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan, expected JSON of PEFT with the numbers r"),
        ({"alpha_pattern": {"mlp.gate.weight": float("nan")}}, "mlp.gate is added times nan"),
        ({"alpha_pattern": {"mlp.gate.weight": 4}}, "mlp.gate is added times 1"),
        ({"rank_pattern": {"q_proj": 8}}, r"q_proj has rank 4 \(8 by adapter_config.json\)"),
    ]:
        changed(tmp_path, **good | keys)
        with pytest.raises(ValueError, match=match):
            read(tmp_path, plan)
        (tmp_path / CONFIG).write_text(json.dumps(good))
    read(tmp_path, plan)
    wider = replace_lora(plan, rank=8, alpha=16.0)
    with pytest.raises(ValueError, match=r"has rank 4 .*expected 8 as in lora.rank"):
        read(tmp_path, wider)
    with pytest.raises(ValueError, match=r"\d+ factors are missing .*It has gate, q_proj"):
        read(tmp_path, replace_lora(plan, targets=["q_proj", "gate", "o_proj"]))
    changed(tmp_path, {"base_model.model.lm_head.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"1 names \['base_model.model.lm_head.weight'\]"):
        read(tmp_path, plan)
    (tmp_path / TENSORS).unlink()
    with pytest.raises(FileNotFoundError, match=TENSORS):
        read(tmp_path, plan)


def replace_lora(plan, **keys):
    return plan.model_copy(update={"lora": plan.lora.model_copy(update=keys)})


def test_read_adapter_refuses_fused_experts_that_do_not_fit(tmp_path):
    plan, _ = written(tmp_path)
    number = plan.sizes.num_experts
    rank = plan.lora.rank
    width = plan.sizes.moe_intermediate_size
    a = torch.randn(2 * rank * number, plan.sizes.hidden_size)
    b = torch.ones(2 * width, 2 * rank * number)
    fuse(tmp_path, plan, (a, b))
    twice = {"rank_pattern": {"gate_up_proj": 8}, "alpha_pattern": {"gate_up_proj": 16}}
    with pytest.raises(ValueError, match=r"gate_up_proj has rank 8 \(4 by .* expected 4"):
        read(tmp_path, plan)
    changed(tmp_path, **twice)
    with pytest.raises(ValueError, match=r"share factors of rank 8.*Set lora.expert_rank to 8"):
        read(tmp_path, plan)
    changed(tmp_path, {f"{PAIR}.lora_B.weight": b[:, 1:].contiguous()})
    with pytest.raises(ValueError, match=r"expected A \[E r, in\] and B \[out, r E\]"):
        read(tmp_path, plan)
    fuse(tmp_path, plan, (a[: rank * number], b[:, : rank * number]))
    changed(tmp_path, rank_pattern={}, alpha_pattern={})
    shared = replace_lora(plan, experts="shared_outer")
    with pytest.raises(ValueError, match="differs between experts"):
        read(tmp_path, shared)
