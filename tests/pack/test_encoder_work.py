"""Patches of a step's images: shard_batch brings each to the ranks that encode it and to no other,
part by part, from whichever ranks own its sample; compared with loops over images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.exchange import roles_of, shard_batch
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.samples import Image, Sample
from pyrl_ext.schedule import Schedule
from tests.helpers.pictures import write_run
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import make_sample
from tests.helpers.tiny import LAYERS, one_rank

pytestmark = pytest.mark.multiprocess

WIDTH = 96  # of a patch: 3 channels, 2 times, 4 x 4
LAYOUTS = {  # of the language model, of the encoder: four ranks
    "dp=2": "dp=2",
    "tp=2": "tp=2",
    "dp=3": "",
    "": "dp=3",
    "pp=2": "pp=2",
}
HOSTS = ([0, 0, 0, 0], [0, 1, 2, 3], [5, 7, 5, 7])
OWNERS = ([0, 1, 2, 3], [0, 1, 0, 1], [2, 2, 2, 2])


def sample(prompt: int, index: int) -> Sample:
    draw = np.random.default_rng(prompt)  # samples of a group share their images
    row = 0
    images = list[Image]()
    for number in range((0, 1, 2, 3, 1, 0)[prompt]):
        high = int(draw.integers(1, 5))
        wide = int(draw.integers(1, 4))
        g = torch.Generator().manual_seed(10 * prompt + number)
        patches = torch.randint(256, (4 * high * wide, WIDTH), generator=g, dtype=torch.uint8)
        row += int(draw.integers(0, 2))
        images.append(Image(row, high * wide, (1, 2 * high, 2 * wide), patches))
        row += high * wide
    drawn = make_sample(prompt, index, row + 1, 2 + (prompt * 5 + index * 3) % 17, 8)
    assert drawn.routes is not None
    return replace(drawn, routes=drawn.routes[..., :2], layer_ids=LAYERS, images=tuple(images))


SAMPLES = [sample(prompt, index) for prompt in range(6) for index in range(2)]


def plan_of(config: Path, llm: str, vision: str) -> Plan:
    words = [*(f"parallel.{w}" for w in llm.split())]
    words += [f"modules.vision.parallel.{w}" for w in vision.split()]
    words += ["batching.tokens_per_microbatch=48", "data.max_prompt_tokens=40"]
    return compile_plan(config, words)


def step_of(rank: int, plan: Plan, owners: list[int], samples: list[Sample]) -> tuple:
    """(the rank's samples as a batch, what all ranks know, schedules)."""
    mine = [s for s in samples if owners[s.prompt_id % 4] == rank]
    parts = [
        BatchIndex.of([s for s in samples if owners[s.prompt_id % 4] == r], r) for r in range(4)
    ]
    index = BatchIndex.joined(parts, range(6))
    batch = Batch.of(mine, torch.zeros(len(mine)), patch_width=WIDTH) if mine else None
    return batch, index, Scheduler(plan).minibatches(index)


def moved_to_ranks(group: dist.ProcessGroup, config: Path) -> list[Any]:
    rank = group.rank()
    found = []
    for llm, vision in LAYOUTS.items():
        plan = plan_of(config, llm, vision)
        for hosts in HOSTS:
            for owners in OWNERS:
                topo = replace(one_rank(plan), rank=rank, world_size=4, hosts=tuple(hosts))
                batch, index, schedules = step_of(rank, plan, owners, SAMPLES)
                shard, moved = shard_batch(batch, index, schedules, plan, topo)
                shard.wait(len(shard.schedule) - 1)
                bytes_ = moved.network["images"], moved.shared["images"]
                encoded = encoded_on(shard, schedules, plan, rank)
                everyone = gather_objects(encoded, group)
                found.append((llm, hosts, owners, bytes_, everyone))
    bare = [replace(s, images=()) for s in SAMPLES]
    plan = plan_of(config, "dp=2", "dp=2")
    topo = replace(one_rank(plan), rank=rank, world_size=4, hosts=(0, 1, 2, 3))
    batch, index, schedules = step_of(rank, plan, OWNERS[0], bare)
    shard, moved = shard_batch(batch, index, schedules, plan, topo)
    shard.wait(len(shard.schedule) - 1)  # nothing may be on its way when the process ends
    images = shard.images["vision"].microbatch(0, max(0, shard.role.replica))
    assert moved.network["images"] == 0 and images[1:] == ([(1, 2, 2)], 0)
    assert (images[0] is None) == (rank < 2)
    return found


def encoded_on(
    shard: BatchShard, schedules: list[Schedule], plan: Plan, rank: int
) -> list[tuple[int, int, int]]:
    """(microbatch, sample, row) of every image whose patches the rank has; they are compared."""
    grid = plan.grids["vision"]
    images = shard.images["vision"]
    encodes = rank in grid.ranks and grid.place(rank).pp == 0
    assert (images.patches is not None) == encodes == (shard.role.replica >= 0)
    if not encodes:
        return []
    replica = grid.place(rank).dp
    found = list[tuple[int, int, int]]()
    first = 0
    assert shard.role.replica == replica
    for number, schedule in enumerate(schedules):
        part = shard.minibatch(number).images["vision"]
        for m in range(len(schedule)):
            whole = images.microbatch(first + m, replica)
            patches, grids, _ = part.microbatch(m, replica)
            assert torch.equal(whole[0], patches) and whole[1] == grids  # type: ignore[arg-type]
            ids = images.work.ids(first + m, replica)
            names = images.work.images.table[ids, :2].tolist()
            held = {*schedule.samples} & {i for g in schedule.microbatches[m] for i in g.samples}
            assert {s for s, _ in names} <= held
            want = [next(x for x in SAMPLES[s].images if x.row == row) for s, row in names]
            if want:
                assert torch.equal(patches, torch.cat([x.patches for x in want]))  # type: ignore[arg-type]
                assert grids == [x.grid for x in want]
            found += [(first + m, s, row) for s, row in names]
        first += len(schedule)
    return found


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    return run_ranks(moved_to_ranks, 4, write_run(tmp_path_factory.mktemp("pictures")))


def test_shard_batch_brings_every_image_to_one_replica(exchanged, tmp_path):
    config = write_run(tmp_path)
    every = [(i, x.row) for i, s in enumerate(SAMPLES) for x in s.images]
    for llm, hosts, owners, _, everyone in exchanged[0]:
        grid = plan_of(config, llm, LAYOUTS[llm]).grids["vision"]
        replicas = range(grid.parallel.dp)
        for tp in range(grid.parallel.tp):
            parts = [everyone[grid.rank_of(dp=dp, tp=tp)] for dp in replicas]
            assert sorted((s, row) for part in parts for _, s, row in part) == every
            assert len(parts) == 1 or all(parts), (llm, hosts, owners)


def test_shard_batch_moves_exactly_the_patches_that_a_rank_encodes(exchanged):
    most = 0
    for rank, found in enumerate(exchanged):
        for llm, hosts, owners, bytes_, everyone in found:
            network = shared = 0
            for _, s, row in everyone[rank]:
                (image,) = (x for x in SAMPLES[s].images if x.row == row)
                owner = owners[SAMPLES[s].prompt_id % 4]
                network += image.patches.numel() * (hosts[owner] != hosts[rank])
                shared += image.patches.numel() * (hosts[owner] == hosts[rank] and owner != rank)
            assert bytes_ == (network, shared), (rank, llm, hosts, owners)
            most = max(most, network, shared)
    assert most > 1000


def test_seats_of_follows_the_grids(tmp_path):
    """A rank may compute rows of the language model and take patches."""
    config = write_run(tmp_path)
    index = BatchIndex.of(SAMPLES)
    roles = roles_of(plan_of(config, "dp=2", "dp=2"), index)
    assert [(s.replica, s.grid_rank) for s in roles] == [(-1, 0), (-1, 1), (0, -1), (1, -1)]
    shared = compile_plan(config, ["parallel.pp=2", "parallel.tp=2", "modules.vision.ranks=shared"])
    roles = roles_of(shared, index)
    assert [(s.replica, s.last_stage) for s in roles[2:]] == [(-1, True), (-1, True)]
    assert [(s.replica, s.tp_rank) for s in roles[:2]] == [(0, 0), (1, 1)]
