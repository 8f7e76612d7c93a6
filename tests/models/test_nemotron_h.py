"""Nemotron-H: its tensors under every split, and the models of every layout and of the engine."""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.models.hf_folder import SafetensorsFolder
from pyrl_ext.models.shards import shard_of, whole_of
from pyrl_ext.models.weight_table import RandomWeights
from pyrl_ext.pack.schedule import plan_microbatches
from pyrl_ext.parallel import topology
from pyrl_ext.plan.model.family import read_sizes
from pyrl_ext.rollout.build import build_engine
from pyrl_ext.samples import Prompt, Sampling
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.helpers.checkpoints import content
from tests.helpers.models import NEMOTRON, check_layouts, plan_of, write_model
from tests.helpers.passes import WholeBatch
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def test_weights_are_the_tensors_of_transformers_under_every_split(tmp_path):
    write_model(tmp_path, NEMOTRON)
    sizes = read_sizes(NEMOTRON)
    table = sizes.weights(0)
    folder = SafetensorsFolder(tmp_path)
    folder.check(table, sizes.ignored(0))
    for row in table:
        tensors = [folder(name)[:] for name in row.hf_names]
        assert tuple(tuple(tensor.shape) for tensor in tensors) == row.shapes
        for size in (1, 2):
            shards = [shard_of(row, tensors, size, rank) for rank in range(size)]
            assert all(shard.shape == row.shard_shape(size) for shard in shards), row
            assert all(map(torch.equal, whole_of(row, shards), tensors)), row


def test_RandomWeights_starts_states_as_transformers_does():
    table = read_sizes(NEMOTRON).weights(0)
    draw = RandomWeights(table, 0.02, seed=1)
    states = "backbone.layers.0.mixer."
    for name in ("D", "norm.weight"):
        assert torch.equal(draw(states + name), torch.ones_like(draw(states + name)))
    assert torch.equal(draw("backbone.norm_f.weight"), torch.ones(64))
    steps = F.softplus(draw(f"{states}dt_bias"))
    assert steps.min() >= 0.000999 and steps.max() <= 0.1001 and steps.max() > 3 * steps.min()
    decays = draw(f"{states}A_log").exp()
    assert decays.min() >= 0.01 and decays.max() <= 16 and decays.std() > 1
    assert not draw(f"{states}conv1d.bias").any()


LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "cp2": ("parallel.cp=2", "model.recompute=full"),
    "pp2": (
        "parallel.pp=2",
        "parallel.pipeline_model_parallel_layout=Et|tt|t|tL",
        "parallel.vpp=2",
    ),
    "dp2 ep2 dynamic": ("parallel.dp=2", "parallel.ep=2", "parallel.dynamic_cp=2"),
}


def test_Policy_of_every_layout_equals_one_process(tmp_path):
    layouts = {name: ("nemotron_h", *overrides) for name, overrides in LAYOUTS.items()}
    check_layouts(tmp_path, {"nemotron_h": NEMOTRON}, layouts, atol=1e-4)


def test_engine_and_trainer_bound_no_steps_of_time(tmp_path):
    """transformers bounds those of prompts by itself, which moves logits here."""
    theirs = write_model(tmp_path, NEMOTRON)
    tokens = tuple(range(3, 60))
    mixers = [module for module in theirs.modules() if hasattr(module, "time_step_limit")]
    logits = []
    with torch.no_grad():
        for mixer in mixers:
            mixer.dt_bias -= 8
        theirs.save_pretrained(tmp_path)
        for bound in (NEMOTRON["time_step_min"], 0.0):
            for mixer in mixers:
                mixer.time_step_limit = bound, float("inf")
            logits.append(theirs(torch.tensor([tokens])).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    plan = plan_of(tmp_path, "rollout.max_new_tokens=6", "replay=off")
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        engine = build_engine(plan, topo.device)
        engine.load_weights(policy.weights(), version=0)
        samples = engine.generate([Prompt(0, tokens)], Sampling(max_new_tokens=6, seed=1))
        samples = [replace(sample, reward=0.0) for sample in samples]
        batch = WholeBatch.of(samples, torch.zeros(1), num_experts=12, layer_ids=None)
        schedule = plan_microbatches(batch.seqlens, 1, 64)
        scores = passes.scores(policy, batch, schedule, replay=False)
    at = batch.loss_mask
    assert at.sum() == 6
    torch.testing.assert_close(
        scores.logprobs[at], batch.rollout_logprobs[at], atol=3e-5, rtol=1e-6
    )


def save_again(group, folder):
    """The checkpoint, loaded under other layouts and saved as it is."""
    os.environ["WORLD_SIZE"] = str(group.size())
    for name in ("tp2", "pp2"):
        plan = plan_of(folder, "replay=off", *LAYOUTS[name])
        with topology.start(plan) as topo:
            policy = Policy.build(plan, topo)
            policy.load(folder / "one")
            policy.save(folder / name)


def test_load_restores_states_under_other_layouts(tmp_path):
    """Weights and moments of two steps, bit for bit."""
    write_model(tmp_path, NEMOTRON)
    plan = plan_of(tmp_path, "replay=off")
    batch = random_batch()
    schedule = plan_microbatches(batch.seqlens, 1, 128)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        for _ in range(2):
            old = passes.scores(policy, batch, schedule, replay=False).logprobs
            ready = batch.with_(old_logprobs=old)
            passes.update(policy, ready, schedule, build_loss(plan.objective))
        policy.save(tmp_path / "one")
    run_ranks(save_again, 2, tmp_path)
    want = content(tmp_path / "one")
    moved = [k for k, x in want.items() if ".exp_avg_sq." in k and x.any()]
    assert len(moved) > 30 and any("conv1d" in key for key in moved)
    for name in ("tp2", "pp2"):
        found = content(tmp_path / name)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[k], x) for k, x in want.items() if k != "optimizer"), name
