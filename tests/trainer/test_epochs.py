"""Several epochs on a step's samples, against a loop over plain autograd and torch's AdamW."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.plan import Plan
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers.models import QWEN3_SMALL, plan_of, write_model
from tests.helpers.tiny import QUICK

pytestmark = pytest.mark.multiprocess

EPOCHS = 3
LOW = 0.9
HIGH = 1.1
OPTIONS = (
    f"batching.epochs={EPOCHS}",
    "batching.minibatches=2",
    "replay=off",
    f"objective.advantage={__name__}:by_place",
    "objective.entropy_coef=0",
    "objective.clip_low=0.1",
    "objective.clip_high=0.1",
    "optimizer.eps=1e-2",
)


def by_place(rewards: Tensor, groups: Tensor) -> Tensor:
    """Advantages of both signs, whatever the rewards are."""
    return torch.linspace(-1, 1, len(rewards))


@dataclass
class Updates:
    """A number for each update, in order."""

    loss: list[float] = field(default_factory=list[float])
    norm: list[float] = field(default_factory=list[float])
    kl: list[float] = field(default_factory=list[float])
    clipped: list[float] = field(default_factory=list[float])


def logprobs_of(model: Any, sample: Sample) -> Tensor:
    """[R] of the response's tokens."""
    logits = model(sample.tokens[None, :-1]).logits[0]
    targets = sample.tokens[1:, None]
    return logits.log_softmax(-1).gather(-1, targets)[sample.prompt_len - 1 :, 0]


def by_hand(model: Any, minibatches: list[list[Sample]], plan: Plan) -> Updates:
    """Train ``model`` on the samples, scored once before the first update."""
    options = plan.optimizer
    adam = torch.optim.AdamW(
        model.parameters(), options.lr, options.betas, options.eps, options.weight_decay
    )
    samples = [sample for part in minibatches for sample in part]
    advantages = iter(by_place(torch.empty(len(samples)), torch.empty(0)).tolist())
    with torch.no_grad():
        scored = [[(s, logprobs_of(model, s), next(advantages)) for s in p] for p in minibatches]
    found = Updates()
    for part in scored * EPOCHS:
        losses = list[Tensor]()
        kls = list[Tensor]()
        clipped = list[Tensor]()
        for sample, old, advantage in part:
            now = logprobs_of(model, sample)
            ratio = (now - old).exp()
            bounded = ratio.clamp(LOW, HIGH)
            losses.append(-torch.minimum(ratio * advantage, bounded * advantage))
            kls.append(old - now.detach())
            clipped.append(ratio > HIGH if advantage > 0 else ratio < LOW)
        loss = torch.cat(losses).mean()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        adam.step()
        found.loss.append(loss.item())
        found.norm.append(float(norm))
        found.kl.append(float(torch.cat(kls).mean()))
        found.clipped.append(float(torch.cat(clipped).float().mean()))
    return found


def test_update_repeats_the_minibatches_with_the_scores_of_before_the_first_epoch(tmp_path: Path):
    model = write_model(tmp_path, QWEN3_SMALL)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    plan = plan_of(tmp_path, *QUICK, *OPTIONS)
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        samples = copy.copy(rollout.samples)
        minibatches = [[samples[i] for i in part] for part in rollout.index.split(2)]
        shard, _ = step.score(step.batch_of(rollout, clock), rollout.index, clock, check=True)
        metrics = step.update(shard, clock)
        assert step.policy.updates == 2 * EPOCHS
        after = {name: tensor.clone() for name, tensor in step.policy.weights()}
    want = by_hand(model, minibatches, plan)

    def mean(values: list[float]) -> Any:
        return pytest.approx(sum(values) / len(values), rel=1e-4, abs=1e-6)

    assert want.clipped[0] == 0 < want.clipped[-1]
    assert abs(want.kl[0]) < 1e-6 and min(map(abs, want.kl[-2:])) > 1e-4
    assert metrics["loss"] == mean(want.loss)
    assert metrics["grad_norm"] == mean(want.norm)
    assert metrics["policy/ppo_kl"] == mean(want.kl)
    assert metrics["policy/clip_fraction"] == mean(want.clipped)
    assert metrics["policy/last_epoch/ppo_kl"] == mean(want.kl[-2:])
    assert metrics["policy/last_epoch/clip_fraction"] == mean(want.clipped[-2:])
    assert metrics["policy/skipped_updates"] == 0
    moved = 0.0
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(after[name], tensor.detach(), atol=3e-6, rtol=1e-4, msg=name)
        moved = max(moved, float((after[name] - before[name]).abs().max()))
    assert moved > 1e-3
