"""Traffic, groups and store keys of ranks that run, next to the plan's count of them.

    python -m tests.scale --ranks 2 4 8

Trains the tiny model on gloo ranks and counts every collective of a step, the keys that heartbeats
read, the groups that are made and the sockets that are open.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.delivery import TransferStats
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel import topology
from pyrl_ext.parallel.heartbeat import heartbeats
from pyrl_ext.plan import Plan
from pyrl_ext.plan.forecast.scale import World
from pyrl_ext.plan.forecast.workload import Sample, step_samples
from pyrl_ext.train.loop import train
from pyrl_ext.trainer import step as step_module
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import QUICK, tiny_plan
from tests.helpers.traffic import Traffic, counted, sockets

LAYOUTS = {
    2: ("parallel.dp=2",),
    4: ("parallel.dp=2", "parallel.tp=2", "parallel.ep=2", "optimizer.distributed=true"),
    8: ("parallel.dp=4", "parallel.pp=2", "parallel.ep=2", "optimizer.distributed=true"),
}
STEPS = 2
MORE = (*QUICK, f"steps={STEPS}", "evaluate.every=0", "checkpoint.every=0")


class Compared(NamedTuple):
    """A number that was counted and the plan's, and by how much they may differ."""

    name: str
    counted: float
    planned: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return abs(self.counted - self.planned) <= self.tolerance * max(1.0, abs(self.planned))


class Held(NamedTuple):
    """The batch of one step on one rank."""

    lengths: tuple[int, ...]
    """Rows of each sample, on all ranks."""
    numbers: int
    """Bytes of the numbers of all samples."""
    computed: int
    """Bytes of the rows that the rank computes."""
    network: int
    """Bytes of them that came from other hosts."""


class Counted(NamedTuple):
    """The counts of one rank."""

    traffic: Traffic
    sockets: int
    """Sockets of its groups."""
    steps: list[Held]


@contextmanager
def batches() -> Iterator[list[Held]]:
    """The batch of every step inside the block."""
    held: list[Held] = []
    shard_batch = step_module.shard_batch

    def kept(
        batch: Batch | None, index: BatchIndex, *more: Any
    ) -> tuple[BatchShard, TransferStats]:
        shard, moved = shard_batch(batch, index, *more)
        computed = sum(column.nbytes for column in shard.columns.values())
        network = sum(moved.network.values())
        held.append(Held(tuple(index.seqlens.tolist()), index.nbytes, computed, network))
        return shard, moved

    with patch.object(step_module, "shard_batch", kept):
        yield held


def count(group, folder: Path, overrides: tuple[str, ...]) -> Counted:
    """Two steps of a run on this rank."""
    os.environ["WORLD_SIZE"] = str(group.size())
    plan = tiny_plan(*MORE, f"run={folder / 'run'}", *overrides)
    before = sockets()
    with counted() as traffic, batches() as held, topology.start(plan) as topo:
        opened = sockets() - before
        with heartbeats(topo) as heartbeat:
            enter = heartbeat.enter

            def note(phase: str | None) -> None:
                traffic.phase = phase
                enter(phase)

            heartbeat.enter = note
            train(plan, topo, heartbeat)
            while not traffic.reads:  # a heartbeat a second
                time.sleep(0.1)
    return Counted(traffic, opened, held)


def compare(ranks: int, folder: Path) -> Iterator[Compared]:
    """Every quantity of a run on so many ranks; bytes are those that reach a rank in a step."""
    overrides = LAYOUTS[ranks]
    plan = tiny_plan(*MORE, *overrides)
    world = World.of(plan, ranks, False, step_samples(plan))
    assert world is not None
    results: list[Counted] = run_ranks(count, ranks, folder, overrides)
    traffic, opened, _ = results[0]

    def received(*words: str) -> float:
        return max(each.traffic.received(*words) for each in results) / STEPS

    # dp_cp and expt_dp; megatron pads the parts of ranks
    update = "time/update"
    copies = "dp"
    sums = "reduce_scatter" if plan.optimizer.distributed else "allreduce_coalesced"
    yield Compared("gradients [byte]", received(update, sums, copies), world.gradient_bytes, 0.02)
    gathered = received(update, "gather", copies)
    yield Compared("updated weights [byte]", gathered, world.weight_bytes, 0.02)
    published = received("time/publish", "broadcast")
    yield Compared("weights for the engine [byte]", published, world.publish_bytes, 0.15)
    yield from compare_batch(plan, ranks, results)
    # not to itself
    gathered = received("time/rollout", "gather")
    share = (ranks - 1) / ranks
    objects = share * (world.gathered_index_bytes + world.agreement_bytes)
    yield Compared("numbers and failures gathered [byte]", gathered, objects, 0.05)
    keys = max(results[-1].traffic.reads)
    yield Compared("keys in a request", keys, world.keys_read, 0)
    yield Compared("groups that it makes", len(traffic.new_groups), len(world.groups), 0)
    yield Compared("ranks in them", sum(traffic.new_groups), sum(world.groups), 0)
    yield Compared("connections of gloo", opened + ranks, world.group_entries, 0)


def compare_batch(plan: Plan, ranks: int, results: list[Counted]) -> Iterator[Compared]:
    """Every step's rows, on all ranks together, and its index; one host receives from no other."""
    sizes = plan.parallel
    for step, first in enumerate(results[0].steps):
        world = World.of(plan, ranks, False, [Sample(1, rows) for rows in first.lengths])
        assert world is not None
        computed = sum(each.steps[step].computed for each in results)
        stages = sum(map(world.row_bytes, range(sizes.pp)))
        yield Compared("rows computed [byte]", computed, world.rows * stages * sizes.tp, 0)
        yield Compared("numbers of samples [byte]", first.numbers, world.index_bytes, 0)
        network = sum(each.steps[step].network for each in results)
        yield Compared("from other hosts [byte]", network, world.exchange_bytes, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=LAYOUTS)
    failed = 0
    for ranks in parser.parse_args().ranks:
        print(f"{ranks} ranks: {' '.join(LAYOUTS[ranks])}")
        with tempfile.TemporaryDirectory() as folder:
            for each in compare(ranks, Path(folder)):
                sign = "" if each.agrees else "  DIFFERS"
                failed += not each.agrees
                print(f"  {each.name:32}{each.counted:14,.0f}{each.planned:14,.0f}{sign}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
