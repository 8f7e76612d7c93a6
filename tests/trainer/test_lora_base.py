"""The base under adapters: it is the reference policy, serves several adapters, and in bfloat16."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers import passes
from tests.helpers.lora import draw_b, factors, gradients
from tests.helpers.tiny import QUICK, random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess

LORA = ("lora.alpha=16", "lora.publish=merge", "lora.rank=8")
KL = ("objective.kl_coef=0.1", "objective.kl=k2")


def test_the_reference_of_a_step_is_the_base_to_the_bit():
    """After an update, when the policy is no longer its base; nothing else is held."""
    plan = tiny_plan(*QUICK, *KL, *LORA)
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        assert step.reference is None
        draw_b(step.policy.llm)
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        shard = step.batch_of(rollout, clock)
        scored, old = step.score(shard, rollout.index, clock)
        frozen = Policy.build(tiny_plan(*QUICK, *KL), topo, trainable=False)
        want = frozen.scores(shard, plan.replay.reference).logprobs
        mask = scored.columns["loss_mask_0"]
        assert torch.equal(scored.columns["ref_logprobs"][mask], want[mask])
        assert old is not None
        assert (old.logprobs - want)[mask].abs().max() > 0.01
        assert step.update(scored, clock)["loss/ref_kl"] > 0


def train(policy, steps, seed):
    """Updates of ``policy``; (log-probs after them, factors)."""
    plan = policy.plan
    batch = random_batch(9, seed)
    schedule = plan_microbatches(batch.seqlens, 1, 128, plan.row_alignment)
    for _ in range(steps):
        passes.step(policy, batch, schedule)
    after = passes.scores(policy, batch, schedule).logprobs
    return after, factors(policy.llm)


def test_share_base_serves_adapters_that_are_trained_in_turn():
    plans = [tiny_plan(*LORA), tiny_plan(*LORA[:2], "lora.rank=4", "lora.targets=[o_proj]")]
    with topology.start(plans[0]) as topo:
        alone = [train(Policy.build(p, topo), 2, i) for i, p in enumerate(plans)]
        first, second = policies = [Policy.build(p, topo) for p in plans]
        before = {n: t.clone() for n, t in first.llm.weights().items()}
        second.llm.share_base(first.llm)
        held = first.llm.weights()
        for name, tensor in second.llm.weights().items():
            assert tensor.data_ptr() == held[name].data_ptr() and tensor.equal(before[name])
        _, together = [[train(p, 1, i) for i, p in enumerate(policies)] for _ in range(2)]
        for (logprobs, held), (want, wanted) in zip(together, alone, strict=True):
            assert torch.equal(logprobs, want)
            assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())
        assert all(t.equal(before[n]) for n, t in second.llm.weights().items())
        other = Policy.build(tiny_plan(*LORA, "seed=1"), topo)
        with pytest.raises(ValueError, match=r"share_base.*expected adapters on the same base"):
            other.llm.share_base(first.llm)


def test_adapters_in_bfloat16_have_the_gradients_of_float32():
    """They differ by the rounding of bfloat16, also what five updates change in the policy."""
    found = []
    for dtype in ("float32", "bfloat16"):
        plan = tiny_plan(*LORA, f"model.dtype={dtype}", "rollout.dtype=float32")
        batch = random_batch(9)
        with passes.built(plan) as policy:
            draw_b(policy.llm)
            schedule = plan_microbatches(batch.seqlens, 1, 128, plan.row_alignment)
            old = passes.scores(policy, batch, schedule).logprobs
            known = replace(batch, old_logprobs=old)
            passes.accumulate(policy, known, schedule, build_loss(plan.objective))
            gradient = torch.cat([g.flatten() for g in gradients(policy.llm).values()]).double()
            found.append((gradient, train(policy, 5, 0)[0] - old))
    (exact, moved), (rounded, moved_rounded) = found
    assert (rounded - exact).norm() < 0.05 * exact.norm()
    assert (moved_rounded - moved).norm() < 0.05 * moved.norm()
