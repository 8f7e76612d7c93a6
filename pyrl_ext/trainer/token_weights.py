"""Weights of tokens that follow from a scored batch: made once, on the host, before the update."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.loss.corrections import correct
from pyrl_ext.loss.inputs import AdvantageFn, masked
from pyrl_ext.loss.kl import VALUES
from pyrl_ext.loss.reductions import reduction_weights
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan


def weigh_tokens(
    shard: BatchShard, index: BatchIndex, plan: Plan, topo: Topology, advantage: AdvantageFn
) -> tuple[BatchShard, dict[str, float]]:
    """The rows with the weights that the plan's objective asks for, and metrics of them.

    Args:
        shard: with ``old_logprobs``, unless `Plan.scores_in_update`, and ``ref_logprobs`` and
            ``teacher_logprobs`` where there is a reference and a teacher of sampled tokens.

    Returns: with more columns on the last stage: ``weights`` of the reduction, ``corrections``,
        ``shares`` of sequences, and ``advantages`` of rewards less the KL (``kl_in: reward``), with
        the teacher's part.
    Communicates: sums of each trajectory over ranks, for what needs whole ones.
    """
    objective = plan.objective
    columns = dict[str, Tensor]()
    metrics = dict[str, float]()
    rows = shard.rows.tokens if shard.role.last_stage else shard.rows.tokens[:0]
    samples = shard.lengths.sample_of(rows)
    tokens = index.loss_tokens[:, 0]
    here = shard.columns if shard.role.last_stage else {}
    none = torch.empty(0)
    mask = here.get("loss_mask_0", none.bool())
    old = here.get("old_logprobs", none)
    if objective.reduction != "token":
        columns["weights"] = torch.from_numpy(_reduction(shard, index, plan)[samples])
    if objective.needs_sequences:
        shares = torch.from_numpy((1 / np.maximum(tokens, 1))[samples]).float()
        columns["shares"] = masked(shares, mask)
    at = torch.from_numpy(samples)
    over_ranks = partial(sum_over_ranks, topo=topo)
    parts = torch.from_numpy(index.trajectories)
    count = len(index.firsts)
    if objective.corrects and not plan.scores_in_update:
        rollout = here.get("rollout_logprobs", none)
        weights, found = correct(objective, old, rollout, mask, parts[at], count, over_ranks)
        columns["corrections"] = weights.float()
        sums = sum_over_ranks(torch.stack([*found.values()]), topo).tolist()
        whole = max(1, int(tokens.sum()))
        metrics = {name: value / whole for name, value in zip(found, sums, strict=True)}
    scored = shaped(index, plan)
    if objective.kl_coef and objective.kl_in == "reward":
        k = masked(old - here.get("ref_logprobs", none), mask).double()
        none_yet = torch.zeros(count, dtype=torch.float64)
        kl = over_ranks(none_yet.index_add(0, parts[at], VALUES[objective.kl](k)))  # 0 where k is
        off = objective.kl_coef * kl[parts].numpy()
        less = replace(scored, rewards=scored.rewards - off)
        columns["advantages"] = less.advantages(advantage)[at]
        metrics["reward/kl"] = float(kl.mean())
    if objective.teaches_sampled:
        gap = masked(here.get("teacher_logprobs", none) - old, mask)
        limit = objective.distill_clip
        taught = gap if limit is None else gap.clamp(-limit, limit)
        own = columns.get("advantages", here.get("advantages", none))
        columns["advantages"] = own + objective.distill_coef * taught
        cut = (gap != taught).sum().double()
        sums = sum_over_ranks(torch.stack([-gap.double().sum(), cut]), topo).tolist()
        whole = max(1, int(tokens.sum()))
        kl, clipped = (value / whole for value in sums)
        metrics |= {"policy/teacher_kl": kl, "policy/teacher_clip_fraction": clipped}
    if objective.overlong_buffer:
        metrics["reward/overlong"] = float((scored.rewards - index.rewards)[index.firsts].mean())
    return shard.with_columns(**columns) if shard.role.last_stage else shard, metrics


def shaped(index: BatchIndex, plan: Plan) -> BatchIndex:
    """The numbers of the samples with rewards that are shaped by what each trajectory sampled."""
    objective = plan.objective
    lengths = index.per_trajectory(index.sampled)
    how = plan.most_sampled, objective.overlong_buffer, objective.overlong_penalty
    return replace(index, rewards=index.rewards + overlong(lengths, *how)[index.trajectories])


def _reduction(shard: BatchShard, index: BatchIndex, plan: Plan) -> np.ndarray:
    """[S] float32, the weight of the tokens of each sample in its minibatch."""
    objective = plan.objective
    constant = objective.reduction_constant or plan.most_sampled
    tokens = index.per_trajectory(index.loss_tokens[:, 0])
    groups = index.groups[index.firsts]
    weights = np.zeros(len(tokens), np.float32)
    for number in range(len(shard.minibatches)):
        ids = np.asarray(shard.minibatch(number).schedule.samples, np.int64)
        whole = np.unique(index.trajectories[ids])  # a minibatch has whole groups
        given = torch.from_numpy(tokens[whole]), torch.from_numpy(groups[whole])
        weights[whole] = reduction_weights(objective.reduction, *given, constant).numpy()
    return weights[index.trajectories]


def overlong(lengths: np.ndarray, longest: int, buffer: int, penalty: float) -> np.ndarray:
    """``min(-(n - (longest - buffer)) / buffer * penalty, 0)``: a response loses reward in the last
    ``buffer`` tokens of its room.

    Args:
        lengths: [S] tokens n of each response.
        longest: tokens that a response may have.
        buffer:  0: nothing is lost.
        penalty: lost by a response of ``longest`` tokens [reward].

    Returns: [S] float64, at most 0; to be added to the rewards.
    Source: DAPO, https://arxiv.org/abs/2503.14476.
    """
    if not buffer:
        return np.zeros(len(lengths))
    over = lengths.astype(np.float64) - (longest - buffer)
    return np.minimum(-over / buffer * penalty, 0.0)
