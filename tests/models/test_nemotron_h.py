"""Nemotron-H: time steps without bounds, and checkpoints of states."""

from dataclasses import replace

import pytest
import torch

from pyrl_ext.rollout.build import build_engine
from pyrl_ext.samples import Prompt, Sampling
from pyrl_ext.schedule import plan_microbatches
from tests.helpers import passes
from tests.helpers.checkpoints import content
from tests.helpers.models import NEMOTRON, plan_of, write_model
from tests.helpers.passes import WholeBatch
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "pp2": (
        "parallel.pp=2",
        "parallel.pipeline_model_parallel_layout=Et|tt|t|tL",
        "parallel.vpp=2",
    ),
}


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
    with passes.built(plan) as policy:
        engine = build_engine(plan, policy.topo.device)
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
    for name in ("tp2", "pp2"):
        plan = plan_of(folder, "replay=off", *LAYOUTS[name])
        with passes.built(plan) as policy:
            policy.load(folder / "one")
            policy.save(folder / name)


def test_load_restores_states_under_other_layouts(tmp_path):
    """Weights and moments of two steps, bit for bit."""
    write_model(tmp_path, NEMOTRON)
    plan = plan_of(tmp_path, "replay=off")
    batch = random_batch()
    schedule = plan_microbatches(batch.seqlens, 1, 128)
    with passes.built(plan) as policy:
        for _ in range(2):
            passes.step(policy, batch, schedule, replay=False)
        policy.save(tmp_path / "one")
    run_ranks(save_again, 2, tmp_path)
    want = content(tmp_path / "one")
    moved = [k for k, x in want.items() if ".exp_avg_sq." in k and x.any()]
    assert len(moved) > 30 and any("conv1d" in key for key in moved)
    for name in ("tp2", "pp2"):
        found = content(tmp_path / name)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[k], x) for k, x in want.items() if k != "optimizer"), name
