"""Weights of a scored batch in a step of a run: against sums over its samples one by one."""

import numpy as np
import pytest

from pyrl_ext.dist import topology
from pyrl_ext.dist.clock import Clock
from pyrl_ext.loss.shaping import overlong
from pyrl_ext.trainer.step import RolloutStep
from tests.helpers.tiny import QUICK, tiny_plan

ROOM, BUFFER = 6, 3


def test_a_step_shapes_rewards_and_leaves_cut_responses_out():
    """Advantages of rewards less length and KL; the filter looks at the length alone."""
    plan = tiny_plan(
        *(*QUICK, f"objective.overlong_buffer={BUFFER}"),
        *(
            'rollout.stop=["0","1","2","3","4","a","e","b"]',
            "objective.overlong_filter=true",
            "objective.overlong_penalty=0.5",
        ),
        *("objective.kl_coef=0.3", "objective.kl_in=reward", "objective.kl=k1"),
        *("objective.reduction=sequence", "objective.normalize_std=false"),
    )
    clock = Clock()
    with topology.start(plan) as topo:
        step = RolloutStep.build(plan, topo)
        for parameter in step.policy.llm.named_parameters().values():  # k is not 0 everywhere
            parameter.data.mul_(1.01)
        step.publish(0, clock)
        rollout = step.take(0, clock)
        shard, index = step.batch_of(rollout, clock), rollout.index
        shard, _ = step.score(shard, index, clock)
        columns, found = shard.columns, step.weighed
        step.close()
    cut = index.truncated
    assert cut.any() and not cut.all()
    assert (index.loss_tokens[cut, 0] == 0).all() and (index.loss_tokens[~cut, 0] > 0).all()
    rewards = index.rewards + overlong(index.sampled, ROOM, BUFFER, 0.5)
    assert (rewards[cut] == index.rewards[cut] - 0.5).all()
    assert found["reward/overlong"] == pytest.approx((rewards - index.rewards).mean())
    samples = shard.lengths.sample_of(shard.rows.tokens)
    mask = columns["loss_mask_0"].numpy()
    k = np.where(mask, (columns["old_logprobs"] - columns["ref_logprobs"]).numpy(), 0)
    kl = np.array([k[samples == i].sum() for i in range(len(index))])
    assert found["reward/kl"] == pytest.approx(kl.mean(), rel=1e-5) and abs(kl).max() > 1e-3
    rewards = rewards - 0.3 * kl
    means = {g: rewards[index.groups == g].mean() for g in index.groups}
    want = rewards - np.array([means[g] for g in index.groups])
    assert columns["advantages"].numpy() == pytest.approx(want[samples], abs=1e-5)
    weights, first = columns["weights"].numpy(), 0
    for count in shard.minibatches:
        part = shard.schedule.microbatches[first : first + count]
        ids = [i for groups in part for group in groups for i in group.samples]
        ones = sum(weights[(samples == i) & mask].mean() for i in ids if not cut[i])
        tokens, live = index.loss_tokens[ids, 0].sum(), (~cut[ids]).sum()
        share = sum(1 / index.loss_tokens[i, 0] for i in ids if not cut[i])
        assert ones == pytest.approx(tokens / live * share, rel=1e-5)
        first += count
