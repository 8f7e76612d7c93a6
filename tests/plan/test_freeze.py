"""Patterns of `model.freeze`: the tensors that they name, and what is suggested for one that names
none. Broken configs have the other messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.plan.forecast.parameters import trained_of_stage
from pyrl_ext.plan.show.summary import facts
from tests.helpers.configs import hf_of, problems_of, write_sizes
from tests.helpers.plan_pages import glm47
from tests.helpers.tiny import CONFIG, tiny_plan


def test_frozen_has_the_tensors_that_a_pattern_matches_whole_names_of():
    """The checkpoint's names; several of them may be one tensor, and a tensor has one name."""
    plan = tiny_plan("model.freeze=['*.gate_proj.weight', '*.up_proj.weight', model.norm.weight]")
    experts = {f"{layer}.mlp.experts.local_experts.{i}" for layer in (1, 2, 3) for i in range(8)}
    shared = {f"{layer}.mlp.shared_experts" for layer in (1, 2, 3)}
    assert plan.frozen == {
        "decoder.final_layernorm.weight",
        *(f"decoder.layers.{part}.linear_fc1.weight" for part in {"0.mlp"} | experts | shared),
    }
    assert tiny_plan().frozen == frozenset()
    assert tiny_plan("model.freeze=['*.mlp.gate.weight']").frozen == {
        f"decoder.layers.{layer}.mlp.router.weight" for layer in (1, 2, 3)
    }


def test_frozen_keeps_the_routers_bias_next_to_routers_that_are_frozen():
    rate = "model.router_bias_update_rate=0.001"
    assert tiny_plan("model.freeze=['*.input_layernorm.weight']", rate).frozen
    for pattern in ("*.mlp.gate.weight", "*.e_score_correction_bias"):
        (problem,) = problems_of(CONFIG, f"model.freeze=['{pattern}']", rate)
        assert "routers with model.router_bias_update_rate 0.001, expected 0" in problem


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("q_a_proj", "Did you mean model.layers.*.self_attn.q_a_proj.weight?"),
        ("embedding*", "Did you mean model.embed_tokens.weight?"),  # a name of megatron-core
        ("model.embed_token.weight", "Did you mean model.embed_tokens.weight"),
        ("xyz", "Names are such as model.layers.*.input_layernorm.weight, "),
    ],
)
def test_compile_plan_suggests_names_for_a_pattern_without_a_match(pattern: str, hint: str):
    (problem,) = problems_of(CONFIG, f"model.freeze=['{pattern}']")
    assert f"'{pattern}' matches none of 129 weights" in problem and hint in problem


def test_compile_plan_refuses_to_freeze_a_tied_head_by_another_name(tmp_path: Path):
    sizes = write_sizes(tmp_path, hf_of() | {"tie_word_embeddings": True})
    (problem,) = problems_of(CONFIG, sizes, "model.freeze=[lm_head.weight]")
    assert (
        "The head is model.embed_tokens.weight (tie_word_embeddings): freeze that, for both"
    ) in problem
    plan = compile_plan(CONFIG, [sizes, "model.freeze=[model.embed_tokens.weight]"])
    assert plan.frozen == {"embedding.word_embeddings.weight"}


def test_facts_count_frozen_parameters():
    plan = tiny_plan("model.freeze=['*.mlp.gate.weight', model.embed_tokens.weight]")
    assert dict(facts(plan))["frozen"] == (
        "9.728K parameters in 4 tensors, by model.freeze; a weight sync sends 1.12 MiB of 1.157 "
        "MiB after the first one"
    )
    assert "frozen" not in dict(facts(tiny_plan()))


def test_trained_of_stage_without_any_layer_is_what_stages_hold_outside_of_layers():
    """The last stage has MTP layers too, and so its own embedding, the head and the final norm."""
    split = ("parallel.dp=4", "parallel.ep=4", "parallel.pp=2")
    uneven = "parallel.num_layers_in_first_pipeline_stage=24"
    plan = glm47("model.mtp=true", "model.freeze=['model.layers.*']", uneven, *split)
    hidden = plan.sizes.hidden_size
    matrix = plan.sizes.vocab_size * hidden
    first, last = (trained_of_stage(plan, stage) for stage in (0, 1))
    assert (first.total, last.total) == (matrix, 2 * matrix + hidden)
