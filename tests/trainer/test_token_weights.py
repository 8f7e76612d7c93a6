"""Weights of a scored batch in a step of a run: against sums over its samples one by one."""

from contextlib import closing
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.end_to_end import shard_at
from pyrl_ext.loss.registry import build_advantage
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.timers import Clock
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.plan.schema.objective import Objective
from pyrl_ext.trainer.step import RolloutStep
from pyrl_ext.trainer.token_weights import overlong, weigh_tokens
from tests.helpers import forms
from tests.helpers.tiny import QUICK, tiny_plan

pytestmark = pytest.mark.multiprocess

ROOM = 6
BUFFER = 3


def test_a_step_shapes_rewards_and_leaves_cut_responses_out():
    """Advantages of rewards less length and KL; the filter looks at the length alone."""
    plan = tiny_plan(
        *QUICK,
        f"objective.overlong_buffer={BUFFER}",
        'rollout.stop=["0","1","2","3","4","a","e","b"]',
        "objective.overlong_filter=true",
        "objective.overlong_penalty=0.5",
        "objective.kl_coef=0.3",
        "objective.kl_in=reward",
        "objective.kl=k1",
        "objective.reduction=sequence",
        "objective.normalize_std=false",
    )
    clock = Clock()
    with topology.start(plan) as topo, closing(RolloutStep.build(plan, topo)) as step:
        for parameter in step.policy.llm.named_parameters().values():  # k is not 0 everywhere
            parameter.data.mul_(1.01)
        step.sync_weights(0, clock)
        rollout = step.take(0, clock)
        shard = step.batch_of(rollout, clock)
        index = rollout.index
        shard, _ = step.score(shard, index, clock)
        columns = shard.columns
        found = step.weighed
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
    weights = columns["weights"].numpy()
    first = 0
    for count in shard.minibatches:
        part = shard.schedule.microbatches[first : first + count]
        ids = [i for groups in part for group in groups for i in group.samples]
        ones = sum(weights[(samples == i) & mask].mean() for i in ids if not cut[i])
        tokens = index.loss_tokens[ids, 0].sum()
        live = (~cut[ids]).sum()
        share = sum(1 / index.loss_tokens[i, 0] for i in ids if not cut[i])
        assert ones == pytest.approx(tokens / live * share, rel=1e-5)
        first += count


def test_weigh_tokens_gives_a_token_one_weight_however_its_trajectory_is_cut():
    """Reductions, corrections and the KL in the reward; a trajectory is whole in each of them."""
    section = {
        **{"reduction_constant": 11, "tis": "sequence", "tis_cap": 3.0, "mask_ratio": [0.5, 2.0]},
        **{"sequence_bounds": [0.85, 1.15], "veto": 0.55, "kl_coef": 0.3, "kl_in": "reward"},
        **{"overlong_buffer": 4, "normalize_std": False},
    }
    batch = forms.drawn((12, 30, 9, 24, 5, 17))
    groups = [0, 0, 0, 1, 1, 1]
    bare = tiny_plan("rollout.max_new_tokens=8")
    place = RankCoords()
    found = dict[tuple[str, str], dict[str, Tensor]]()
    metrics = dict[tuple[str, str], Any]()
    with topology.start(bare) as topo:
        for form, reduction in product(forms.FORMS, ("sequence", "sequence_sum", "prompt")):
            objective = Objective.model_validate(section | {"reduction": reduction})
            plan = bare.model_copy(update={"objective": objective})
            advantage = build_advantage(objective)
            samples, rows = forms.cut(batch, groups, [1.0, 0.0, 0.5, 1.0, 0.0, 0.0], form)
            whole, index = forms.batch_of(batch, samples, rows, advantage)
            shard = shard_at(whole, range(len(samples)), place)
            at = torch.from_numpy(shard.rows.tokens)
            assert whole.old_logprobs is not None and whole.ref_logprobs is not None
            shard = shard.with_columns(
                old_logprobs=whole.old_logprobs[at], ref_logprobs=whole.ref_logprobs[at]
            )
            shard, metrics[form, reduction] = weigh_tokens(shard, index, plan, topo, advantage)
            mask = shard.columns["loss_mask_0"]
            found[form, reduction] = {
                name: torch.full((len(batch.tokens),), torch.nan).index_copy(
                    0, rows[at][mask], shard.columns[name].float()[mask]
                )
                for name in ("weights", "corrections", "advantages")
            }
    for (form, reduction), columns in found.items():
        for name, column in columns.items():
            want = found["concatenated", reduction][name]
            case = f"{form} {reduction} {name}"
            torch.testing.assert_close(column, want, equal_nan=True, msg=case)
            distinct = len(column[~column.isnan()].unique())
            assert distinct > 1 or name == "weights", case
        for name, value in metrics["concatenated", reduction].items():
            assert metrics[form, reduction][name] == pytest.approx(value, abs=1e-6), name
            assert value != 0, name


def test_overlong_equals_published_numbers():
    lengths = np.array([1, 16384, 18432, 20480])
    assert overlong(lengths, 20480, 4096, 1.0).tolist() == [0, 0, -0.5, -1]
    assert overlong(lengths, 20480, 0, 1.0).tolist() == [0, 0, 0, 0]
    assert overlong(np.array([9]), 10, 4, 2.0)[0] == pytest.approx(-1.5)
