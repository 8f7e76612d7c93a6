"""benchmarks.upcycle: a dense model as a sparse one, by transformers and by the trainer."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks import replay_language
from benchmarks.replay_language import SHOWN
from benchmarks.upcycle import upcycle
from pyrl_ext.parallel import topology
from tests.helpers.models import (
    LLAMA,
    QWEN3_SMALL,
    SMOLLM,
    exact_logprobs,
    plan_of,
    policy_like_transformers,
    write_model,
)
from tests.helpers.tiny import QUICK, random_batch

DENSE = {"llama": LLAMA, "smollm": SMOLLM}  # the second shares embeddings and LM head


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", DENSE)
def test_upcycle_without_noise_keeps_the_log_probs(tmp_path, name):
    dense = write_model(tmp_path / "dense", DENSE[name])
    sparse = tmp_path / "sparse"
    upcycle(tmp_path / "dense", sparse, experts=6, topk=2, noise=0.0, seed=3)
    theirs = AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.float32).eval()
    assert type(theirs).__name__ == "MixtralForCausalLM"
    batch = random_batch(9)
    want = exact_logprobs(dense, batch)
    torch.testing.assert_close(exact_logprobs(theirs, batch), want, atol=3e-5, rtol=1e-6)
    plan = plan_of(sparse)
    assert plan.sizes.num_experts == 6 and plan.sizes.topk == 2
    policy_like_transformers(sparse, plan, theirs, batch)


def test_upcycle_writes_what_a_config_leaves_to_llama(tmp_path):
    """Mixtral's defaults are others."""
    write_model(tmp_path / "dense", LLAMA)
    file = tmp_path / "dense/config.json"
    config = json.loads(file.read_text())
    heads = config["num_attention_heads"]
    for name in ("num_key_value_heads", "rope_parameters", "rope_theta", "initializer_range"):
        config.pop(name, None)
    file.write_text(json.dumps(config))
    (tmp_path / "dense/.cache").mkdir()
    upcycle(tmp_path / "dense", tmp_path / "sparse", experts=4, topk=2, noise=0.0, seed=1)
    written = json.loads((tmp_path / "sparse/config.json").read_text())
    assert (written["rope_theta"], written["num_key_value_heads"]) == (10000.0, heads)
    with pytest.raises(ValueError, match="expected another folder"):
        upcycle(tmp_path / "dense", tmp_path / "dense", experts=4, topk=2, noise=0.0, seed=1)


def test_upcycle_draws_noise_and_routers_from_the_seed(tmp_path):
    write_model(tmp_path / "dense", SMOLLM)
    of = {}
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        upcycle(tmp_path / "dense", tmp_path / name, experts=4, topk=2, noise=0.01, seed=seed)
        of[name] = load_file(tmp_path / name / "model.safetensors")
    dense = load_file(tmp_path / "dense/model.safetensors")
    for name, tensor in of["first"].items():
        assert torch.equal(tensor, of["again"][name])
        drawn = "block_sparse_moe" in name
        assert torch.equal(tensor, of["other"][name]) != drawn
        assert drawn or torch.equal(tensor, dense[name])
    layer = "model.layers.1"
    up = dense[f"{layer}.mlp.up_proj.weight"]
    experts = [of["first"][f"{layer}.block_sparse_moe.experts.{i}.w3.weight"] for i in range(4)]
    factors = torch.stack(experts) / up - 1
    assert factors.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(torch.corrcoef(factors[:2].flatten(1))[0, 1].item()) < 0.1


def test_agreement_of_counts_shared_experts():
    ours = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [1, 0]]])
    theirs = torch.tensor([[[1, 0], [3, 4]], [[4, 5], [2, 3]]])
    found = replay_language.agreement_of(ours, theirs)
    assert found == {"route/agree_topk": 0.625, "route/exact_set": 0.5}


@pytest.mark.multiprocess
def test_replay_language_scores_the_same_answers_three_times(tmp_path):
    """The trainer's own routes change nothing, to the last bit; the engine's do, in bf16."""
    write_model(tmp_path / "dense", SMOLLM)
    sparse = tmp_path / "sparse"
    upcycle(tmp_path / "dense", sparse, experts=8, topk=2, noise=0.3, seed=0)
    plan = plan_of(sparse, *QUICK, "model.dtype=bfloat16", f"run={tmp_path}/run")
    with topology.start(plan) as topo:
        tokens, found = replay_language.measured(plan, topo)
    off, trainer, engine = found.values()
    assert 0 < tokens <= 16 * 6
    assert off.items() <= trainer.items()
    assert off["mismatch/k3"] > 0 and engine["mismatch/k3"] > 0
    assert off["route/agree_topk"] > 0.8 and engine["route/agree_topk"] > 0.8
    assert set(SHOWN) <= off.keys() & engine.keys()


def test_upcycle_refuses_what_has_no_sparse_form(tmp_path):
    write_model(tmp_path / "qwen", QWEN3_SMALL)
    with pytest.raises(ValueError, match="expected model_type llama, without biases"):
        upcycle(tmp_path / "qwen", tmp_path / "out", 4, 2, 0.0, 0)
    write_model(tmp_path / "llama", SMOLLM)
    with pytest.raises(ValueError, match="--top-k 5, expected 1 to 4"):
        upcycle(tmp_path / "llama", tmp_path / "out", 4, 5, 0.0, 0)
    assert not (tmp_path / "out").exists()
