"""Every family over TransformerEngine's layers, kernels by formulas, is transformers' model."""

import re
from collections.abc import Callable

import pytest
import torch

from pyrl_ext.megatron import te
from pyrl_ext.megatron.optimizer import name_of
from pyrl_ext.models import weight_table
from pyrl_ext.parallel import topology
from pyrl_ext.trainer.policy import Policy
from tests.helpers.models import (
    DEEPSEEK,
    GLM,
    MOONLIGHT,
    QWEN3_SMALL,
    TRAINED,
    check_layouts,
    plan_of,
    policy_like_transformers,
    write_model,
)
from tests.helpers.tiny import random_batch

pytestmark = pytest.mark.multiprocess

TE = ("model.backend=te", "replay=off")
SEVERAL = {"deepseek_v3": DEEPSEEK, "moonlight": MOONLIGHT, "glm4_moe": GLM, "qwen3": QWEN3_SMALL}
# layers with states are refused there
STATES = ("qwen3_next", "nemotron_h", "qwen3_5", "qwen3_5_moe")
HERE = {name: hf for name, hf in TRAINED.items() if name not in STATES}


@pytest.mark.parametrize("hf", HERE.values(), ids=list(HERE))
def test_te_spec_equals_the_model_of_transformers(tmp_path, hf):
    """Log-probs, tensors that come back, every live tensor claimed once, parameters counted."""
    theirs = write_model(tmp_path, hf)
    batch = random_batch(9)
    policy, _ = policy_like_transformers(tmp_path, plan_of(tmp_path, *TE), theirs, batch, atol=3e-5)
    kinds = {type(module).__name__ for module in policy.llm.models[0].modules()}
    assert "TERowParallelLinear" in kinds and not kinds & {"RowParallelLinear", "GroupedExperts"}
    assert ("TEGroupedMLP" in kinds) == bool(policy.plan.sizes.num_experts)
    assert name_of(policy.llm.optimizer) == "transformer_engine.FusedAdam"


# faults of the names, each of which that test must see --------------------------------------------


def swapped(first: str, second: str) -> Callable[[str], str]:
    """Exchanges two parts of names."""
    other = {first: second, second: first}
    return lambda name: re.sub(
        f"{re.escape(first)}|{re.escape(second)}", lambda m: other[m[0]], name
    )


def moved(pattern: str, by: Callable[[int], int]) -> Callable[[str], str]:
    """Renumbers the experts of the names that ``pattern`` begins."""
    numbered = re.compile(rf"(local_experts\.)(\d+)(\.{pattern})")
    return lambda name: numbered.sub(lambda m: f"{m[1]}{by(int(m[2]))}{m[3]}", name)


NAMES = {
    "norms of a layer swapped": ("qwen3", swapped("input_layernorm", "pre_mlp_layernorm")),
    "norms swapped, latent": ("deepseek_v3", swapped("input_layernorm", "pre_mlp_layernorm")),
    "norms of q and kv swapped": ("deepseek_v3", swapped("q_layernorm", "kv_layernorm")),
    "experts reversed": ("glm4_moe", moved("", lambda e: 11 - e)),
    "fc2 of experts shifted by one": ("deepseek_v3", moved("linear_fc2", lambda e: (e + 1) % 12)),
}


@pytest.mark.parametrize("name", NAMES)
def test_te_spec_with_wrong_names_is_not_the_model(tmp_path, monkeypatch, name):
    model, rename = NAMES[name]
    right = weight_table.local_name
    monkeypatch.setattr(weight_table, "local_name", lambda *given: rename(right(*given)))
    assert_differs(tmp_path, SEVERAL[model])


def test_te_spec_with_gate_and_up_swapped_is_not_the_model(tmp_path, monkeypatch):
    right = weight_table.shard_of

    def turned(weight, tensors, size, rank):
        found = right(weight, tensors, size, rank)
        return torch.cat(found.chunk(2)[::-1]) if weight.shard == "gated" else found

    monkeypatch.setattr(weight_table, "shard_of", turned)
    assert_differs(tmp_path, GLM)


def test_te_spec_as_megatron_has_it_norms_wide_queries(tmp_path, monkeypatch):
    """With megatron's own class, a norm that no checkpoint has: no row of the table claims it."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from pyrl_ext.megatron import local_layers

    monkeypatch.setattr(local_layers, "LatentAttention", MLASelfAttention)
    write_model(tmp_path, MOONLIGHT)
    with (
        topology.start(plan := plan_of(tmp_path, *TE)) as topo,
        pytest.raises(ValueError, match=r"linear_q_proj\.layer_norm_weight"),
    ):
        Policy.build(plan, topo)


def assert_differs(folder, hf) -> None:
    theirs = write_model(folder, hf)
    batch = random_batch(9)
    with pytest.raises((AssertionError, RuntimeError)):
        policy_like_transformers(folder, plan_of(folder, *TE), theirs, batch, atol=3e-5)


# ranks -------------------------------------------------------------------------------------------


def test_Policy_of_every_layout_equals_one_process(tmp_path):
    layouts = {
        "tp2 with yarn and groups": ("deepseek_v3", "model.backend=te", "parallel.tp=2"),
        "tp2 with wide queries": ("moonlight", "model.backend=te", "parallel.tp=2"),
        "tp2 with biases": ("glm4_moe", "model.backend=te", "parallel.tp=2"),
        "pp2 without experts": ("qwen3", "model.backend=te", "parallel.pp=2"),
    }
    check_layouts(tmp_path, SEVERAL, layouts)


def test_te_spec_says_that_megatron_found_no_transformer_engine(monkeypatch):
    from megatron.core.extensions import transformer_engine

    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    with pytest.raises(RuntimeError, match="could not import transformer_engine"):
        te.te_spec(None, None, 0)
