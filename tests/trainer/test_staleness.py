"""Metrics by the age of tokens: each age that may be trained has its own."""

from dataclasses import replace

import pytest
import torch

from benchmarks.end_to_end import index_of
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.parallel import topology
from pyrl_ext.schedule import plan_microbatches
from pyrl_ext.trainer.policy import Scores
from pyrl_ext.trainer.staleness import ages_of, by_age
from tests.helpers.tiny import random_batch, tiny_plan

pytestmark = pytest.mark.multiprocess


def test_by_age_tells_carried_groups_from_others():
    """With ``ahead: 1`` a group that is carried is two versions old."""
    step = 5
    plan = tiny_plan()
    batch = random_batch(9)
    plan = plan.model_copy(update={"rollout": plan.rollout.model_copy(update={"ahead": 1})})
    ages = torch.arange(len(batch.tokens)) % 3
    batch = replace(batch, versions=(step - ages).int())
    index = index_of(batch)
    schedule = plan_microbatches(batch.seqlens, 1, 64)
    with topology.start(plan) as topo:
        shard, _ = shard_batch(batch, index, [schedule], plan, topo)
        shard = shard.with_columns(ages=ages_of(shard, step, plan))
        gaps = 0.5 ** ages[torch.from_numpy(shard.rows.tokens)]
        scores = Scores(shard.columns["rollout_logprobs"] + gaps, torch.zeros_like(gaps))
        found = by_age(shard, scores, index, step, plan, topo)
    counts = torch.bincount(ages[batch.loss_mask], minlength=3)
    shares = [found[f"age/share_{age}"] for age in range(3)]
    assert shares == pytest.approx((counts / counts.sum()).tolist())
    assert [found[f"age/mismatch_{age}"] for age in range(3)] == pytest.approx([1, 0.5, 0.25])
