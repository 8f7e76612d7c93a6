"""A policy's passes over a whole batch that every rank holds, as tests compare them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.end_to_end import index_of
from pyrl_ext.loss.inputs import LossFn
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import shard_batch
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.plan import Plan
from pyrl_ext.schedule import Schedule
from pyrl_ext.trainer.policy import Policy, Scores
from pyrl_ext.trainer.token_weights import weigh_tokens


@contextmanager
def built(plan: Plan, **how: Any) -> Iterator[Policy]:
    """This rank's policy, in a topology that ends with the block."""
    with topology.start(plan) as topo:
        yield Policy.build(plan, topo, **how)


@dataclass(frozen=True, eq=False)
class WholeBatch(Batch):
    """A batch with log-probs of its targets, [T] float32 each."""

    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_hidden: Tensor | None = None


def shard_of(policy: Policy, batch: Batch, schedule: Schedule) -> BatchShard:
    """This rank's shard of a whole batch that it holds itself, so that nothing moves."""
    plan = policy.plan
    topo = policy.topo
    index = index_of(batch, topo.rank, plan.num_mtp_layers)
    schedule = schedule.padded(topo.pp_size if topo.vpp_size else 1)
    shard, moved = shard_batch(batch, index, [schedule], plan, topo)
    assert not any(moved.network.values()) and not any(moved.shared.values())
    rows = torch.from_numpy(shard.rows.tokens)
    names = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "teacher_hidden")
    scores = {n: getattr(batch, n, None) for n in names}
    if not shard.role.last_stage:
        return shard
    return shard.with_columns(**{n: x[rows] for n, x in scores.items() if x is not None})


def scores(policy: Policy, batch: Batch, schedule: Schedule, replay: bool = True) -> Scores:
    """`Policy.scores` of all rows of the batch, on every rank."""
    shard = shard_of(policy, batch, schedule)
    found = policy.scores(shard, replay)
    stream = torch.zeros(2, len(batch.tokens))
    if shard.role.last_stage and not policy.topo.tp_rank:  # each row once
        rows = torch.from_numpy(shard.rows.tokens)
        stream[:, rows] = torch.stack([found.logprobs, found.entropy])
    dist.all_reduce(stream)
    return Scores(stream[0], stream[1], found.agreement)


def weighed(policy: Policy, batch: Batch, schedule: Schedule) -> BatchShard:
    """The shard with the weights that the objective asks for; old log-probs are 0 if unknown."""
    shard = shard_of(policy, batch, schedule)
    if shard.role.last_stage and "old_logprobs" not in shard.stored:
        zeros = torch.zeros_like(shard.columns["rollout_logprobs"])
        shard = shard.with_columns(old_logprobs=zeros)

    def no_advantage(rewards: Tensor, *_: Tensor) -> Tensor:
        return torch.zeros_like(rewards)

    return weigh_tokens(shard, index_of(batch), policy.plan, policy.topo, no_advantage)[0]


def accumulate(policy: Policy, batch: Batch, schedule: Schedule, loss: LossFn) -> dict[str, float]:
    """`Policy.accumulate` over a whole batch."""
    return policy.accumulate(weighed(policy, batch, schedule), loss)


def update(policy: Policy, batch: Batch, schedule: Schedule, loss: LossFn) -> dict[str, float]:
    """`Policy.update` on a whole batch."""
    return policy.update(weighed(policy, batch, schedule), loss)


def step(
    policy: Policy, batch: Batch, schedule: Schedule, replay: bool = True
) -> tuple[Scores, dict[str, float]]:
    """The scores of a whole batch, and an update by the plan's objective to which they are old."""
    old = scores(policy, batch, schedule, replay)
    known = replace(batch, old_logprobs=old.logprobs)
    return old, update(policy, known, schedule, build_loss(policy.plan.objective))


def prefetch(policy: Policy, batch: Batch, schedule: Schedule, **options: Any) -> Any:
    """The policy's microbatches of a whole batch."""
    return policy._prefetch(shard_of(policy, batch, schedule), **options)


def select(batch: Batch, ids: Sequence[int]) -> Batch:
    """The batch of samples ``ids``, in that order."""
    starts = batch.starts
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in ids])
    fields = {n: x[rows] for n in vars(batch) if isinstance(x := getattr(batch, n), Tensor)}
    return replace(batch, seqlens=tuple(batch.seqlens[i] for i in ids), **fields)
