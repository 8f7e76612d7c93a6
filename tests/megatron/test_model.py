"""The megatron model is the transformers model: logits, names and bits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pyrl_ext.megatron.grouped_experts import GroupedExperts
from pyrl_ext.models.hf_folder import save_safetensors
from pyrl_ext.parallel import topology
from pyrl_ext.plan.model.counts import parameters
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.configs import write_sizes
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with the tiny model's initial weights, as transformers reads them."""
    folder = tmp_path_factory.mktemp("hf")
    plan = tiny_plan("seed=3")
    with passes.built(plan) as policy:
        save_safetensors(folder, policy.weights(), plan.hf)
    return folder


@pytest.mark.parametrize("pattern", ["dsss", "dsdssd", "sdsd"])
def test_scores_agree_with_transformers(tmp_path, pattern):
    """Log-probs and entropies of packed rows equal those of one sequence at a time in
    transformers, with dense layers before, between and behind those with experts."""
    kinds = [{"d": "dense", "s": "sparse"}[letter] for letter in pattern]
    hf = tiny_plan().hf | {"mlp_layer_types": kinds, "num_hidden_layers": len(kinds)}
    del hf["first_k_dense_replace"]
    plan = tiny_plan(write_sizes(tmp_path, hf), "seed=3")
    batch = random_batch(9)
    with passes.built(plan) as policy:
        save_safetensors(tmp_path, policy.weights(), plan.hf)
        scores = passes.scores(policy, batch, plan_microbatches(batch.seqlens, 1, 64), replay=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert sum(p.numel() for p in theirs.parameters()) == parameters(plan.sizes).total
    first = 0
    for length in batch.seqlens:
        rows = slice(first, first + length)
        with torch.no_grad():
            exact = theirs(batch.tokens[rows][None]).logits[0].double().log_softmax(-1)
        want = exact.gather(-1, batch.targets[rows][:, None])[:, 0]
        torch.testing.assert_close(scores.logprobs[rows].double(), want, atol=1e-4, rtol=0)
        entropy = -(exact.exp() * exact).sum(-1)
        torch.testing.assert_close(scores.entropy[rows].double(), entropy, atol=1e-4, rtol=0)
        first += length


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_bit_equal_after_a_round_trip(exported, tmp_path, dtype):
    source = {
        name: t if name.endswith("e_score_correction_bias") else t.to(getattr(torch, dtype))
        for name, t in load_file(exported / "model.safetensors").items()
    }
    save_file(source, tmp_path / "model.safetensors")
    plan = tiny_plan(f"model.weights={tmp_path}", f"model.dtype={dtype}")
    with passes.built(plan) as policy:
        back = dict(policy.weights())
    assert back.keys() == source.keys()
    for name, tensor in back.items():
        assert tensor.dtype == source[name].dtype, name
        assert torch.equal(tensor, source[name]), name


def test_build_refuses_a_checkpoint_of_another_model(exported, tmp_path):
    tensors = load_file(exported / "model.safetensors")
    tensors["model.layers.1.mlp.typo.weight"] = tensors.pop("model.layers.1.mlp.gate.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        topology.start(plan := tiny_plan(f"model.weights={tmp_path}")) as topo,
        pytest.raises(ValueError, match=r"1 tensors are missing .*gate.weight.*mlp.typo.weight"),
    ):
        Policy.build(plan, topo)


def test_build_leaves_mtp_layers_out_by_name(exported, tmp_path):
    tensors = load_file(exported / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    hf = json.loads((exported / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    with passes.built(tiny_plan(f"model.weights={tmp_path}", write_sizes(tmp_path, hf))) as policy:
        back = dict(policy.weights())
    assert "model.layers.4.eh_proj.weight" not in back
    assert len(back) == len(tensors) - 1


@pytest.mark.parametrize(
    ("overrides", "recomputed"),
    [
        ((), False),
        (("model.recompute=selective",), False),
        (("model.recompute=selective", "model.recompute_modules=[moe_act]"), True),
        (("model.recompute=selective", "model.recompute_modules=[core_attn,moe_act]"), True),
    ],
)
def test_policies_have_experts_that_recompute_what_the_plan_names(overrides, recomputed):
    with passes.built(tiny_plan(*overrides)) as policy:
        modules = [module for chunk in policy.llm.chunks for module in chunk.modules()]
    experts = [module for module in modules if isinstance(module, GroupedExperts)]
    assert len(experts) == 3
    assert {module.recomputes_unit for module in experts} == {recomputed}
