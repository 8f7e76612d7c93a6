"""A gradient of exactly 0: refused where gradients are off, accepted where samples ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.whole import shard_at
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.schedule import plan_microbatches
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import Place
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.trainer.sft import SftStep
from pyrl_ext.trainer.zero_gradient import check_zero_gradient, tokens_with_gradient
from tests.helpers import passes
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

SFT = Path(__file__).parents[2] / "configs/tiny_sft.yaml"


def test_update_refuses_a_gradient_that_is_switched_off():
    plan = tiny_plan("objective.entropy_coef=0")
    batch = random_batch(6)
    schedule = plan_microbatches(batch.seqlens, 1, 128)
    loss = build_loss(plan.objective)
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo)
        batch = batch.with_(old_logprobs=passes.scores(policy, batch, schedule).logprobs)
        flat = batch.with_(advantages=torch.zeros(len(batch.tokens)))
        # equal rewards everywhere
        assert passes.update(policy, flat, schedule, loss)["grad_norm"] == 0
        assert passes.update(policy, batch, schedule, loss)["grad_norm"] > 0
        message = r"norm of update 2 is exactly 0, expected a gradient from \d+ tokens"
        with torch.no_grad(), pytest.raises(FloatingPointError, match=message):
            passes.update(policy, batch, schedule, loss)


def test_update_of_records_refuses_a_gradient_that_is_switched_off():
    small = ("batching.samples=4", "batching.minibatches=1", "data.held_out=1")
    plan = tiny_plan(*small, "evaluate.every=0", config=SFT)
    clock = Clock()
    with topology.start(plan) as topo:
        step = SftStep.build(plan, topo)
        shard = step.batch_of(step.take(0, clock), clock)
        assert step.update(shard, clock)["grad_norm"] > 0
        message = r"norm of update 1 is exactly 0, expected a gradient from \d+ tokens whose mean"
        with torch.no_grad(), pytest.raises(FloatingPointError, match=message):
            step.update(shard, clock)
        check_zero_gradient("sft", shard, {"loss": 1e-6}, "", topo)  # all tokens are certain
        check_zero_gradient("my.module:loss", shard, {"loss": 1.0}, "", topo)


def two_samples(second: tuple[int, ...], advantages: tuple[float, float]) -> Batch:
    """Two samples of three rows with the same first one; the loss is on their last two rows."""
    tokens = torch.tensor([5, 6, 7, *second])
    return Batch(
        seqlens=(3, 3),
        tokens=tokens,
        targets=torch.tensor([6, 7, 8, *second[1:], 8]),
        positions=torch.tensor([0, 1, 2] * 2),
        loss_mask=torch.tensor([False, True, True] * 2),
        rollout_logprobs=torch.full((6,), -1.0),
        advantages=torch.tensor(advantages).repeat_interleave(3),
        routes=None,
        layer_ids=(),
        route_mask=torch.zeros(6, dtype=torch.bool),
    )


OTHER = (5, 9, 7)
SAME = (5, 6, 7)


@pytest.mark.parametrize(
    ("second", "advantages", "old", "metrics", "tokens"),
    [
        (OTHER, (1.0, -1.0), -1.0, {}, 4),
        (OTHER, (1.0, 0.0), -1.0, {}, 2),
        (OTHER, (0.0, 0.0), -1.0, {}, 0),  # equal rewards
        (SAME, (1.0, -1.0), -1.0, {}, 0),  # a noisy reward of equal responses cancels
        (OTHER, (1.0, -1.0), -1e-7, {}, 0),  # all probabilities are 1
        (OTHER, (1.0, -1.0), -1.0, {"policy/clip_fraction": 1.0}, 0),
        (OTHER, (1.0, -1.0), -1.0, {"policy/clip_fraction": 0.5}, 2),
        (OTHER, (1.0, 0.0), -1.0, {"policy/guarded_fraction": 0.5}, 0),
    ],
)
def test_tokens_with_gradient_leaves_out_those_that_may_have_none(
    second, advantages, old, metrics, tokens
):
    shard = shard_at(two_samples(second, advantages), range(2), Place())
    shard = shard.with_columns(old_logprobs=torch.full((6,), old))
    with topology.start(tiny_plan()) as topo:
        assert tokens_with_gradient(shard, metrics, topo) == tokens
