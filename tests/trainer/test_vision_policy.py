"""A policy whose vision tower is on ranks behind those of the language model, against plain
autograd through both in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.plan.schema.layout import Module, ModuleParallel
from pyrl_ext.trainer.policy import Policy
from tests.helpers import towers
from tests.helpers.passes import built
from tests.helpers.ranks import run_ranks
from tests.helpers.vision import image_batch, kimi_plan, tower_tensors, whole_tower

pytestmark = pytest.mark.multiprocess

# (vision, language model) on three ranks, and whether the tower trains
LAYOUTS = {
    "pp2 -> 1": ({"pp": 2}, (), True),
    "tp2 -> 1": ({"tp": 2}, (), True),
    "dp2 -> 1": ({"dp": 2}, (), True),
    "1 -> pp2": ({}, ("pp=2", "num_layers_in_first_pipeline_stage=1"), True),
    "frozen -> tp2": ({}, ("tp=2", "etp=1"), False),
}


def passes(policy: Policy, inside: Any = None) -> tuple[float, Tensor]:
    """The loss, with gradients, and the log-probs of all rows on every rank."""
    plan = policy.plan
    topo = policy.topo
    batch = image_batch()
    shard = towers.image_shard(plan, topo, batch, Scheduler(plan).schedule(batch.seqlens))
    if inside:
        inside.images = shard.images["vision"]
    scored = policy.scores(shard, replay=False)
    stream = torch.zeros(len(batch.tokens))
    if shard.role.last_stage and not topo.tp_rank:
        stream[torch.from_numpy(shard.rows.tokens)] = scored.logprobs
    dist.all_reduce(stream)
    policy.accumulate(shard, build_loss(plan.objective))
    metrics = policy.accumulate(shard, build_loss(plan.objective))  # begins as the first
    return metrics["loss"], stream


def alone(group: Any, folder: Path) -> tuple[float, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    plan = kimi_plan(folder)
    with built(plan) as policy:
        tower = whole_tower(plan, policy.topo)
        inside = towers.InProcess(tower)
        policy.edges = {("vision", 0): inside}  # type: ignore[dict-item]
        loss, logprobs = passes(policy, inside)
        tokens = 2 * int(image_batch().loss_mask.sum())  # gradients of two passes add up here
        grads = {name: grad.clone() for name, grad in policy.gradients()}
        weights = {name: tensor.clone() for name, tensor in policy.weights()}
        grads |= tower_tensors(tower, lambda p: p.grad / tokens)
        weights |= tower_tensors(tower, lambda p: p)
        return loss, logprobs, grads, weights


def on_ranks(group: Any, folder: Path) -> dict[str, Any]:
    found = {}
    for name, (vision, llm, train) in LAYOUTS.items():
        keys = Module(
            train=train, patches_per_microbatch=1 << 20, parallel=ModuleParallel(**vision)
        )
        plan = kimi_plan(folder, *(f"parallel.{size}" for size in llm))
        plan = plan.model_copy(update={"modules": {"vision": keys}})
        with built(plan) as policy:
            loss, logprobs = passes(policy)
            grads = {n: x.clone() for n, x in policy.gradients()}
            weights = {n: x.clone() for n, x in policy.weights()}
            found[name] = loss, logprobs, grads, weights, saved_and_loaded(policy, folder / name)
    return found


def saved_and_loaded(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, read into the policy after other values."""
    policy.save(folder)
    with torch.no_grad():
        for module in policy.modules.values():
            for parameter in module.named_parameters().values():
                parameter.fill_(7)
    policy.load(folder)
    return {name: tensor.clone() for name, tensor in policy.weights()}


def test_a_vision_tower_on_other_ranks_trains_as_in_one_process(tmp_path):
    ((loss, logprobs, grads, weights),) = run_ranks(alone, 1, tmp_path)
    for results in run_ranks(on_ranks, 3, tmp_path):
        for name, (_, _, train) in LAYOUTS.items():
            got_loss, got_logprobs, got_grads, got_weights, loaded = results[name]
            assert loaded.keys() == weights.keys(), name
            assert all(torch.equal(x, weights[n]) for n, x in loaded.items()), name
            assert abs(got_loss - loss) < 1e-6, name
            torch.testing.assert_close(got_logprobs, logprobs, atol=1e-5, rtol=1e-5, msg=name)
            assert all(torch.equal(x, weights[n]) for n, x in got_weights.items()), name
            assert got_weights.keys() == weights.keys(), name
            towers_names = {n for n in grads if "vision_tower" in n or "mm_projector" in n}
            assert towers_names and got_grads.keys() == grads.keys()
            for key, grad in got_grads.items():
                if key in towers_names and not train:
                    assert not grad.any(), key
                    continue
                off = float((grad - grads[key]).norm())
                assert off <= 2e-5 * float(grads[key].norm()) + 1e-12, (name, key, off)
