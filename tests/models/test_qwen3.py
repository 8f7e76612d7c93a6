"""Qwen3-MoE: the model of transformers, its tensors under every split, its engine and a run."""

import json
from dataclasses import replace

import pytest
import torch

from pyrl_ext.models.shards import shard_of, whole_of
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.schedule import plan_microbatches
from pyrl_ext.parallel import topology
from pyrl_ext.plan.model.weight import Weight
from pyrl_ext.rollout.build import build_engine
from pyrl_ext.samples import Prompt, Sampling
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.models import (
    changed,
    check_layouts,
    plan_of,
    policy_like_transformers,
    write_model,
)
from tests.helpers.tiny import QWEN3, random_batch, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

MIXED = {"num_hidden_layers": 6, "mlp_only_layers": [0, 3, 5]}
# what transformers 4 wrote
OLD_ROTARY = {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": None}
CHANGES = {
    "dense first": {},
    "dense first, between and last": MIXED,
    "every second dense": {
        "num_hidden_layers": 5,
        "mlp_only_layers": None,
        "decoder_sparse_step": 2,
    },
    "weights not normalized": {"norm_topk_prob": False},
    "one expert a token": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "one key/value head": {"num_key_value_heads": 1},
    "a key/value head each": {"num_key_value_heads": 4, "head_dim": None},
    "tied head": {"tie_word_embeddings": True},
    "other rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "config of transformers 4": OLD_ROTARY,
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
def test_family_equals_the_model_of_transformers(tmp_path, changes):
    """Log-probs, the tensors that come back, and the plan's count of parameters."""
    theirs = write_model(tmp_path, changed(changes))
    batch = random_batch(9)
    policy_like_transformers(tmp_path, plan_of(tmp_path), theirs, batch, atol=2e-5)


# on several ranks --------------------------------------------------------------------------------

LAYOUTS = {
    "tp2": ("mixed", "parallel.tp=2"),
    "tp2 that share a key/value head": ("one head", "parallel.tp=2"),
    "cp2": ("mixed", "parallel.cp=2"),
    "pp2": ("mixed", "parallel.pp=2"),
    "dp2 ep2": ("mixed", "parallel.dp=2", "parallel.ep=2"),
}


def test_Policy_of_every_layout_equals_one_process(tmp_path):
    models = {"mixed": changed(MIXED), "one head": changed({"num_key_value_heads": 1})}
    check_layouts(tmp_path, models, LAYOUTS)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shard_of_interleaves_query_groups(size):
    """Rows q0 q1 k0 v0 | q2 q3 k1 v1 ... as megatron's linear_qkv has them, over any split."""
    weight = Weight.grouped("q", "k", "v", "qkv", (8, 4), 3, 1)
    q, k, v = (
        torch.arange(heads * 3)[:, None] + base for heads, base in ((8, 0), (4, 100), (4, 200))
    )
    shards = [shard_of(weight, [q, k, v], size, rank) for rank in range(size)]
    assert all(shard.shape == weight.shard_shape(size) for shard in shards)
    first = [*range(6), 100, 101, 102, 200, 201, 202]
    assert torch.cat(shards)[:12, 0].tolist() == first
    back = whole_of(weight, shards)
    assert all(torch.equal(got, want) for got, want in zip(back, (q, k, v), strict=True))


# the engine and a run ----------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [MIXED, {"norm_topk_prob": False}], ids=["mixed", "raw"])
def test_build_engine_has_the_model_of_the_trainer(tmp_path, changes):
    """Log-probs of generated tokens, and every router's experts, agree."""
    write_model(tmp_path, changed(changes))
    plan = plan_of(tmp_path, "rollout.max_new_tokens=9")
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        engine = build_engine(plan, topo.device)
        engine.load_weights(policy.weights(), version=0)
        prompts = [Prompt(i, tuple(range(3 + i, 9 + 2 * i))) for i in range(6)]
        samples = engine.generate(prompts, Sampling(max_new_tokens=9, samples_per_prompt=2, seed=1))
        samples = [replace(sample, reward=0.0) for sample in samples]
        experts = plan.sizes.num_experts
        layers = plan.router_layers
        batch = Batch.of(samples, torch.zeros(len(samples)), num_experts=experts, layer_ids=layers)
        scores = passes.scores(policy, batch, plan_microbatches(batch.seqlens, 1, 64))
    assert plan.router_layers == ((1, 2, 4) if changes is MIXED else (1, 2, 3))
    at = batch.loss_mask
    torch.testing.assert_close(
        scores.logprobs[at], batch.rollout_logprobs[at], atol=2e-5, rtol=1e-6
    )
    assert tuple(scores.agreement) == plan.router_layers
    rows = int(batch.route_mask.sum())
    assert all(found == (rows, rows, rows) for found in scores.agreement.values())


# what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "attention_bias is true"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type is linear"),
    ],
)
def test_unsupported_names_what_is_not_built(tmp_path, changes, reason):
    (tmp_path / "config.json").write_text(json.dumps(changed(changes)))
    plan = tiny_plan(f"model.config={tmp_path}/config.json", config=QWEN3)
    assert [u for u in plan.unsupported if u.startswith(f"model.config: {reason}")]
    with topology.start(plan) as topo, pytest.raises(NotImplementedError, match=reason):
        Policy.build(plan, topo)
