"""Every family over TransformerEngine's layers, kernels by formulas, is transformers' model."""

from types import SimpleNamespace

import pytest

from pyrl_ext.megatron.optimizer import name_of
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
# layers with states, and norms over all heads, are refused there
REFUSED = ("qwen3_next", "nemotron_h", "qwen3_5_text", "qwen3_5_moe_text", "minimax_m2")
HERE = {name: hf for name, hf in TRAINED.items() if hf["model_type"] not in REFUSED}


@pytest.mark.parametrize("hf", HERE.values(), ids=list(HERE))
def test_te_spec_equals_the_model_of_transformers(tmp_path, hf):
    """Log-probs, tensors that come back, every live tensor claimed once, parameters counted."""
    theirs = write_model(tmp_path, hf)
    batch = random_batch(9)
    policy, _ = policy_like_transformers(tmp_path, plan_of(tmp_path, *TE), theirs, batch)
    kinds = {type(module).__name__ for module in policy.llm.models[0].modules()}
    assert "TERowParallelLinear" in kinds and not kinds & {"RowParallelLinear", "GroupedExperts"}
    assert ("TEGroupedMLP" in kinds) == bool(policy.plan.sizes.num_experts)
    assert name_of(policy.llm.optimizer) == "transformer_engine.FusedAdam"


def test_te_spec_as_megatron_has_it_norms_wide_queries(tmp_path, monkeypatch):
    """With megatron's own class, a norm that no checkpoint has: no row of the table claims it."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from pyrl_ext.megatron import spec

    monkeypatch.setattr(spec, "LatentAttention", MLASelfAttention)
    write_model(tmp_path, MOONLIGHT)
    with (
        topology.start(plan := plan_of(tmp_path, *TE)) as topo,
        pytest.raises(ValueError, match=r"linear_q_proj\.layer_norm_weight"),
    ):
        Policy.build(plan, topo)


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
    from pyrl_ext.megatron import spec

    monkeypatch.setattr(spec, "HAVE_TE", False)
    config = SimpleNamespace(transformer_impl="transformer_engine")
    with pytest.raises(RuntimeError, match="could not import transformer_engine"):
        spec.decoder_spec(config, None, 0)
