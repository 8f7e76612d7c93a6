"""The trainer's own scores of the engines' canaries, which prove that they have its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pyrl_ext.dist.agree import gather_objects
from pyrl_ext.dist.reduce import sum_over_ranks
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.policy import Policy


class CanaryScores(NamedTuple):
    """How far canaries are from the trainer's forward.

    Args:
        gaps: of each, the mean |log-prob difference| over its sampled tokens [nat]
        apart: layer id -> share of rows where the router does not choose the given experts
    """

    gaps: tuple[float, ...]
    apart: Mapping[int, float]


def score_canaries(policy: Policy, samples: Sequence[Sample]) -> CanaryScores:
    """One forward over ``samples``, with their routes forced and counted against the routers' own.

    Args:
        samples: of the first rank, with distinct prompt ids; the others' are ignored

    Communicates: the samples' tokens and routes to the ranks that compute them, and the scores.
    """
    plan, topo = policy.plan, policy.topo
    given = samples if topo.rank == 0 else ()
    known = BatchIndex.of(given, 0, plan.num_mtp_layers).to_bytes()
    first, *_ = gather_objects(known, topo.world)
    index = BatchIndex.from_bytes(first)
    index = replace(index, rewards=index.rewards * 0)
    (schedule,) = Scheduler(plan).minibatches(index, 1)
    batch = None
    if given:
        layers = plan.router_layers if plan.replay.enabled else None
        kept = plan.sizes.vocab_size if plan.trains_on_kept_sets else None
        none, experts = torch.zeros(len(given)), plan.sizes.num_experts
        batch = Batch.of(given, none, num_experts=experts, layer_ids=layers, kept_of=kept)
    shard, _ = shard_batch(batch, index, [schedule], plan, topo)
    scores = policy.scores(shard, replay=plan.replay.enabled)
    sums = torch.zeros(len(index.seqlens), dtype=torch.float64)
    if shard.seat.last_stage and len(shard.rows.tokens):
        mask = shard.columns["loss_mask_0"]
        gaps = (scores.logprobs - shard.columns["rollout_logprobs"]).abs().double()
        sample = torch.from_numpy(shard.lengths.sample_of(shard.rows.tokens))
        sums.index_add_(0, sample, torch.where(mask, gaps, 0.0).cpu())
    total = sum_over_ranks(sums, topo) / torch.from_numpy(index.sampled).clamp(min=1)
    apart = {n: 1 - each.exact / each.rows for n, each in scores.agreement.items() if each.rows}
    return CanaryScores(tuple(total.tolist()), apart)
