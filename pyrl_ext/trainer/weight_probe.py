"""The trainer's own scores of the engines' canaries, which prove that they have its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.policy import Policy
from pyrl_ext.weights.check import gaps


def score_canaries(
    policy: Policy, samples: Sequence[Sample]
) -> list[tuple[float, Mapping[int, float]]]:
    """One forward a sample, with its routes forced and counted against the routers' own.

    Args:
        samples: of the first rank; those of others are ignored

    Returns: as `rollout.engine.ScoreCanaries` says, the same on every rank.
    Communicates: the samples' tokens and routes to the ranks that compute them, and the scores.
    """
    given = samples if policy.topo.rank == 0 else ()
    count, *_ = gather_objects(len(given), policy.topo.world)
    return [_score(policy, given[n : n + 1]) for n in range(count)]


def _score(policy: Policy, samples: Sequence[Sample]) -> tuple[float, Mapping[int, float]]:
    plan, topo = policy.plan, policy.topo
    known = BatchIndex.of(samples, 0, plan.num_mtp_layers).to_bytes()
    first, *_ = gather_objects(known, topo.world)
    index, batch = BatchIndex.from_bytes(first), None
    schedules = Scheduler(plan).minibatches(index, 1)
    if samples:
        batch = Batch.for_plan(plan, samples, torch.zeros(len(samples)))
    shard, _ = shard_batch(batch, index, schedules, plan, topo)
    scores = policy.scores(shard, replay=plan.replay.enabled)
    gap, counted = gaps(shard, scores.logprobs, int(index.versions[0]))
    total, number = sum_over_ranks(torch.stack([gap.sum(), counted]), topo).tolist()
    apart = {n: 1 - each.share / each.rows for n, each in scores.agreement.items() if each.rows}
    return total / number, apart
