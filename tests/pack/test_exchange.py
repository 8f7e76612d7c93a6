"""shard_batch: every rank gets the rows that it computes, from whichever rank owns them, and only
those; compared with a plain loop over rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pyrl_ext.dist.agree import gather_objects
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import KINDS, Moved, shard_batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Group, Schedule, plan_microbatches
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.ranks import ranks
from pyrl_ext.samples import Sample
from tests.helpers.probe import local_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import make_sample
from tests.helpers.tiny import one_rank, tiny_plan

LAYERS, DEPTHS = (1, 2, 3), 1
LAYOUTS = ("dp=4", "tp=2 pp=2", "cp=2 dp=2", "pp=4", "cp=4", "dp=2 pp=2")
HOSTS = ([0, 0, 0, 0], [0, 1, 2, 3], [5, 7, 5, 7])
OWNERS = ([0, 1, 2, 3], [2, 2, 2, 2], [3, 3, 1, 1])


def sample(prompt: int, index: int) -> Sample:
    drawn = make_sample(prompt, index, 1 + prompt % 3, 2 + (prompt * 5 + index * 3) % 17, 8)
    assert drawn.routes is not None
    g = torch.Generator().manual_seed(prompt)
    mask = drawn.route_mask & (torch.rand(len(drawn.tokens), generator=g) > 0.2)
    return replace(drawn, routes=drawn.routes[..., :2], layer_ids=LAYERS, route_mask=mask)


SAMPLES = [sample(prompt, index) for prompt in range(6) for index in range(2)]


def plan_of(layout: str) -> Plan:
    return tiny_plan(*(f"parallel.{word}" for word in layout.split()), "model.recompute=none")


def schedules_of(plan: Plan, index: BatchIndex) -> list[Schedule]:
    """Two minibatches; where four ranks share no rows, one with context-parallel groups of 2, 1, 1
    and a microbatch that leaves two ranks empty."""
    parallel, found = plan.parallel, []
    for ids in index.split(2):
        lengths = index.seqlens[ids].tolist()
        sizes = parallel.dp, 64, plan.row_alignment, parallel.cp
        found.append(plan_microbatches(lengths, *sizes).renumbered(ids))
    if parallel.dp == 4:
        first, *rest = index.split(2)[0]
        mixed = Group(0, 2, (first,)), Group(2, 1, tuple(rest[:2])), Group(3, 1, (rest[2],))
        few = Group(0, 2, ()), Group(2, 2, tuple(rest[3:]))
        found[0] = Schedule(4, (mixed, few))
    return found


def moved_to_ranks(group: dist.ProcessGroup) -> list[Any]:
    rank, found = group.rank(), []
    for layout in LAYOUTS:
        plan = plan_of(layout)
        for hosts in HOSTS:
            for owners in OWNERS:
                topo = replace(
                    one_rank(plan), rank=rank, world_size=group.size(), hosts=tuple(hosts)
                )
                mine = [s for s in SAMPLES if owners[s.prompt_id % 4] == rank]
                parts = gather_objects(BatchIndex.of(mine, rank, DEPTHS), group)
                index = BatchIndex.joined(parts, range(6))
                values = torch.arange(float(len(index)))[index.owned_by(rank)]
                batch = Batch.of(mine, values) if mine else None
                schedules = schedules_of(plan, index)
                shard, moved = shard_batch(batch, index, schedules, plan, topo)
                check_rows(shard, schedules, plan, rank)
                found.append(
                    (
                        layout,
                        hosts,
                        owners,
                        counted(moved),
                        wanted(shard, plan, rank, hosts, owners),
                    )
                )
    return found


def check_rows(shard: BatchShard, schedules: list[Schedule], plan: Plan, rank: int) -> None:
    """Every column against the samples, row by row."""
    where = ranks(plan.parallel)[rank]
    grid, last = where.dp * plan.parallel.cp + where.cp, where.pp == plan.parallel.pp - 1
    layers = [i for chunk in plan.stages[where.pp] for i in chunk.layers if i in LAYERS]
    whole = Batch.of(SAMPLES, torch.arange(float(len(SAMPLES))))
    sample_of = [s for s, n in enumerate(whole.seqlens) for _ in range(n)]
    rows, routed = [], []
    for schedule in schedules:
        for number in range(len(schedule)):
            group = schedule.group_of(number, grid)
            place = replace_place(group, grid, plan, where.tp)
            local = local_rows(whole, group.samples, place)
            part = len(local) // plan.parallel.tp
            rows += [row for row in local if row >= 0]
            routed += [row for row in local[where.tp * part : (where.tp + 1) * part] if row >= 0]
    assert shard.rows.tokens.tolist() == rows
    assert shard.rows.routers.tolist() == routed
    columns = {name: column.tolist() for name, column in shard.columns.items()}
    assert columns["tokens"] == whole.tokens[rows].tolist()
    for depth in range(1 + DEPTHS):
        ahead = [r + depth for r in rows]
        inside = [
            a < len(sample_of) and sample_of[a] == sample_of[r]
            for a, r in zip(ahead, rows, strict=True)
        ]
        pairs = list(zip(ahead, inside, strict=True))
        targets = [int(whole.targets[a]) if ok else 0 for a, ok in pairs]
        masks = [bool(whole.loss_mask[a]) if ok else False for a, ok in pairs]
        assert columns[f"targets_{depth}"] == targets
        assert columns[f"loss_mask_{depth}"] == masks
    assert ("rollout_logprobs" in columns) == ("advantages" in columns) == last
    if last:
        assert columns["rollout_logprobs"] == whole.rollout_logprobs[rows].tolist()
        assert columns["advantages"] == [float(sample_of[row]) for row in rows]
    assert shard.seat.layers == tuple(layers)
    assert ("routes" in columns) == bool(layers)
    if layers:
        slots = [LAYERS.index(layer) for layer in layers]
        assert whole.routes is not None
        assert columns["routes"] == whole.routes[routed][:, slots].tolist()
        assert columns["route_mask"] == whole.route_mask[routed].tolist()
    for number, schedule in enumerate(schedules):
        part = shard.minibatch(number)
        assert part.schedule.microbatches == schedule.microbatches
        for depth in range(1 + DEPTHS):
            want = sum(int(s.loss_mask[1 + depth :].sum()) for s in of_ids(schedule.samples))
            assert part.loss_tokens[0][depth] == want
    parts = [shard.minibatch(i) for i in range(len(schedules))]
    for name, column in shard.columns.items():
        assert torch.equal(torch.cat([part.columns[name] for part in parts]), column)


def of_ids(ids: list[int]) -> list[Sample]:
    return [SAMPLES[i] for i in ids]


def replace_place(group: Group, grid: int, plan: Plan, tp_rank: int) -> Any:
    from pyrl_ext.dist.topology import Place

    return Place(group.cp_size, grid - group.first, None, plan.parallel.tp, tp_rank)


def counted(moved: Moved) -> tuple[int, int]:
    return sum(moved.network.values()), sum(moved.shared.values())


def wanted(
    shard: BatchShard, plan: Plan, rank: int, hosts: list[int], owners: list[int]
) -> tuple[int, int]:
    """Bytes that the rows of other ranks hold: over the network, in shared memory."""
    per_token = 4 + (1 + DEPTHS) * 5 + (8 if shard.seat.last_stage else 0)
    per_router = len(shard.seat.layers) * 2 + 1 if shard.seat.layers else 0
    whole = Batch.of(SAMPLES, torch.zeros(len(SAMPLES)))
    prompts = np.repeat([s.prompt_id for s in SAMPLES], whole.seqlens)
    network = shared = 0
    for rows, size in ((shard.rows.tokens, per_token), (shard.rows.routers, per_router)):
        for row in rows:
            owner = owners[prompts[row] % 4]
            network += size * (hosts[owner] != hosts[rank])
            shared += size * (hosts[owner] == hosts[rank] and owner != rank)
    return network, shared


@pytest.fixture(scope="module")
def exchanged():
    return run_ranks(moved_to_ranks, 4, timeout=300)


def test_shard_batch_moves_exactly_the_rows_that_a_rank_computes_and_does_not_have(exchanged):
    """The rows themselves are compared on the ranks."""
    totals = {"network": 0, "shared": 0}
    for found in exchanged:
        for layout, hosts, owners, got, want in found:
            assert got == want, (layout, hosts, owners)
            totals["network"] += got[0]
            totals["shared"] += got[1]
    assert min(totals.values()) > 0
    assert len(exchanged[0]) == len(LAYOUTS) * len(HOSTS) * len(OWNERS)


def test_moved_counts_every_kind():
    assert set(Moved().network) == set(Moved().shared) == set(KINDS)
