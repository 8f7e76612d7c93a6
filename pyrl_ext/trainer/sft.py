"""SftStep: a step of fine-tuning on the records of a file, without rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pyrl_ext.data.prompt_dataset import build_records
from pyrl_ext.data.sft import SftSource
from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.rank_rows import layout_of
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.collective_errors import agreeing, gather_objects
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.samples import Sample
from pyrl_ext.trainer.policy import Policy, Scores
from pyrl_ext.trainer.step import Metrics, Phase, Step


@dataclass
class SftStep(Step):
    """A step on records; each rank encodes a share of them."""

    source: SftSource

    @classmethod
    def build(cls, plan: Plan, topo: Topology) -> SftStep:
        """Everything the plan names; bad records fail before a model is built.

        Communicates: what each rank found in its share of the records.
        """
        source = check_records(plan, topo)
        loss = build_loss(plan.objective)
        policy = Policy.build(plan, topo)
        return cls(plan, topo, policy, None, _no_advantage, loss, source)

    def take(self, number: int, phase: Phase) -> RolloutSamples:
        """The records of step ``number``."""
        with phase("time/data"):
            size = self.plan.samples
            rank = self.topo.rank
            ranks = self.topo.world_size
            order = range(number * size, (number + 1) * size)
            return self._shared(lambda: self.source.take(number, size, rank, ranks), order)

    def evaluate(self, phase: Phase) -> Metrics:
        """Mean negative log-likelihood of the loss tokens that are held out."""
        with phase("time/eval"):
            rank = self.topo.rank
            ranks = self.topo.world_size
            order = range(-1, -1 - self.plan.data.held_out, -1)
            held_out = self._shared(lambda: self.source.held_out(rank, ranks), order)
            shard = self.batch_of(held_out, phase, minibatches=1)
            logprobs = self.policy.scores(shard, replay=False, every=False).logprobs
            total = torch.zeros(2)
            if self.topo.is_last_stage:
                mask = shard.columns["loss_mask_0"]
                total = torch.stack([-logprobs[mask].double().sum(), mask.sum().double()])
            missed, tokens = sum_over_ranks(total.double(), self.topo).tolist()
        return {"eval_loss": missed / tokens}

    def metrics(self, index: BatchIndex, shard: BatchShard, old: Scores | None) -> Metrics:
        """Metrics of the step: its records, padding, and moved bytes."""
        seen = (self.policy.step * self.plan.samples) / self.source.size
        return {
            "data/epoch": seen,
            "data/tokens": int(index.starts[-1]) + len(index),
            "data/loss_tokens": int(index.loss_tokens[:, 0].sum()),
            "data/longest": int(index.seqlens.max()) + 1,
            "data/truncated": float(index.truncated.mean()),
            "data/padding": padding(shard),
        } | self.moved.metrics(self.topo)

    def _shared(self, read: Callable[[], list[Sample]], order: range) -> RolloutSamples:
        """The samples that this rank reads, and the numbers of all ranks' in ``order``.

        Raises: on every rank, if one cannot read its own.
        """
        with agreeing("SftStep", "steps", self.topo.world) as doing:
            doing.append(order)
            samples = read()
        mine = BatchIndex.of(samples, self.topo.rank, self.plan.num_mtp_layers)
        parts = gather_objects(mine, self.topo.world)
        return RolloutSamples(BatchIndex.joined(parts, order), samples)


def _no_advantage(rewards: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(rewards)


def check_records(plan: Plan, topo: Topology) -> SftSource:
    """The records of the plan, once every rank has looked at a share of them.

    Raises: DataError with the first problems of the whole file; RuntimeError where ranks read
        other files.
    Communicates: a line of every rank, and its first problems.
    """
    with agreeing("data.path", "records", topo.world) as doing:
        source = build_records(plan)
        path = source.records.path
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        doing += len(source.records), sum(file.stat().st_size for file in files)
    found = gather_objects(source.check(topo.rank, topo.world_size), topo.world)
    facts = source.summary(found)
    if topo.is_main:
        print(facts, flush=True)
    return source


def padding(shard: BatchShard) -> float:
    """Share of the update's rows, over all ranks, that hold no token."""
    computed = sum(
        layout_of(group, shard.lengths, shard.role).num_local * group.cp_size
        for groups in shard.schedule.microbatches
        for group in groups
    )
    return 1 - int(shard.lengths.starts[-1]) / computed
