"""Microbatch: the rows of a rank, for every place that a rank can have."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.end_to_end import index_of, microbatch, positions_of, shard_at
from pyrl_ext.pack.delivery import Delivery
from pyrl_ext.pack.encoder_work import EncoderWork, ShardImages
from pyrl_ext.pack.exchange import RowExchange, columns_of
from pyrl_ext.pack.images import Images
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.pack.positions import axial_positions
from pyrl_ext.pack.rank_rows import RankRole
from pyrl_ext.pack.shard import BatchShard
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.schedule import Group, Schedule
from tests.helpers.late_upload import LateUpload
from tests.helpers.passes import WholeBatch
from tests.helpers.probe import local_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import random_batch

pytestmark = pytest.mark.multiprocess

PLACES = [
    RankCoords(cp, cp_rank, tp_size=tp, tp_rank=tp - 1)
    for cp in (1, 2, 4)
    for cp_rank in range(cp)
    for tp in (1, 2)
]


@pytest.mark.parametrize("tile_rows", [1, 8])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_of_takes_the_rows_of_its_place(place, tile_rows):
    batch = random_batch(6)
    ids = [4, 0, 3]
    routes = batch.routes
    assert routes is not None
    if tile_rows > 1:  # and ids of two bytes
        batch = replace(batch, routes=routes.to(torch.uint16))
    shard = shard_at(batch, ids, place, tile_rows=tile_rows)
    micro = Microbatch.of(shard, 0, place)
    rows = micro.rows
    if tile_rows == 1:
        assert rows.tolist() == local_rows(batch, ids, place)
    tile = tile_rows * place.cp_size * place.tp_size
    assert all(n % tile == 0 for n in micro.layout.padded_seqlens)
    part = len(rows) // place.tp_size
    of_router = rows[place.tp_rank * part :][:part]
    assert torch.equal(micro.at_router >= 0, of_router >= 0)
    taken = shard.columns["routes"].int()[micro.at_router[of_router >= 0]]
    assert torch.equal(taken, routes.int()[of_router[of_router >= 0]])
    known = {"tokens": batch.tokens, "targets": batch.targets, "positions": positions_of(batch)}
    for name, column in known.items():
        want = torch.where(rows >= 0, column[rows.clamp(min=0)], 0)
        assert torch.equal(getattr(micro, name), want)
    assert micro.inputs is not None
    assert torch.equal(micro.inputs.loss_mask, (rows >= 0) & batch.loss_mask[rows.clamp(min=0)])


IDS = ((4, 0), (5,), (1, 3), (2,))  # samples of each microbatch; two in each minibatch


def shard_on_its_way(batch: WholeBatch, place: RankCoords) -> tuple[BatchShard, list[int]]:
    """A shard of four microbatches whose rows come when one is waited for, and the numbers of those
    that were."""
    microbatches = tuple((Group(0, place.cp_size, ids),) for ids in IDS)
    schedule = Schedule(place.cp_size, microbatches)
    index = index_of(batch, depths=2)
    role = RankRole(place.cp_rank, place.tp_rank, place.tp_size, layers=index.layer_ids)
    exchange = RowExchange(index, schedule, [role], 8)
    asked = list[int]()
    rows, needs = exchange.of(0)
    delivery = Delivery(0, needs)

    def wait_for(number: int) -> None:
        asked.append(number)
        delivery.take(0, columns_of(batch, 2))

    columns = delivery.columns
    known = (index.layer_ids, ((0, 0, 0),) * 2)
    shard = BatchShard(schedule, (2, 2), exchange.lengths, role, rows, columns, *known)
    return replace(shard, wait_for=wait_for), asked


def ahead(batch: WholeBatch, name: str, rows: torch.Tensor, depth: int) -> torch.Tensor:
    """Column ``name`` of the row ``depth`` further in the same sample, 0 where there is none."""
    positions = positions_of(batch)
    return torch.tensor(
        [
            getattr(batch, name)[r + depth].item()
            if r >= 0 and int(positions[r + depth : r + depth + 1].sum()) >= depth
            else 0
            for r in rows.tolist()
        ]
    )


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_of_takes_any_microbatch_once_its_rows_are_there(place):
    """The microbatch is one of a step, of its second minibatch, or of that as the only one."""
    batch = random_batch(6)
    for nested in range(3):
        shard, asked = shard_on_its_way(batch, place)
        for number in (1, 0)[:nested]:
            shard = shard.minibatch(number)
        first = 2 if nested else 0
        for number, ids in enumerate(IDS[first:]):
            del asked[:]
            micro = Microbatch.of(shard, number, place, depths=2)
            assert asked == [first + number]
            rows = micro.rows
            real = micro.rows >= 0
            assert rows.tolist() == local_rows(batch, ids, place)
            assert torch.equal(micro.at >= 0, real)
            assert torch.equal(torch.from_numpy(shard.rows.tokens)[micro.at[real]], rows[real])
            of_router = rows.chunk(place.tp_size)[place.tp_rank]
            at = micro.at_router[of_router >= 0]
            routed = of_router[of_router >= 0]
            assert batch.routes is not None
            assert torch.equal(shard.columns["routes"][at], batch.routes[routed])
            assert torch.equal(torch.from_numpy(shard.rows.routers)[at], routed)
            assert torch.equal(micro.at_router >= 0, of_router >= 0)
            assert torch.equal(micro.targets, ahead(batch, "targets", rows, 0))
            for depth in (1, 2):
                mtp = micro.mtp[depth - 1]
                assert torch.equal(mtp.targets, ahead(batch, "targets", rows, depth))
                mask = ahead(batch, "loss_mask", rows, depth).bool()
                assert torch.equal(mtp.loss_mask, mask)
                assert torch.equal(micro.loss_rows[depth], mask.nonzero()[:, 0])
                inside = ahead(batch, "targets", rows, depth - 1)
                assert torch.equal(mtp.tokens, inside)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_of_gives_rows_of_images_positions_in_three_axes(place):
    batch = random_batch(6)
    ids = [i for i, n in enumerate(batch.seqlens) if n > 8]
    assert len(ids) > 1
    numbers = np.array([[i, 2, 6, 1, 4, 6] for i in ids])
    samples, rows, counts = numbers[:, :3].T
    images = Images(samples, rows, counts, numbers[:, 3:])
    shard = shard_at(batch, ids, place)
    work = EncoderWork(images, shard.schedule, shard.lengths, 1)
    seen = replace(shard, images={"vision": ShardImages(work, None, np.zeros(2, np.int64), 2)})
    micro, plain = (Microbatch.of(seen, 0, place, axes=axes) for axes in (True, False))
    want = torch.from_numpy(axial_positions(micro.rows.clamp(min=0).numpy(), shard.lengths, images))
    assert torch.equal(micro.positions, torch.where(micro.rows >= 0, want, 0))
    assert torch.equal(plain.positions, Microbatch.of(shard, 0, place, axes=True).positions)
    assert plain.positions.shape == micro.rows.shape


TOGETHER = (0, 3, 4)  # samples whose rows two ranks share


@pytest.mark.parametrize("depths", [0, 2])
def test_of_reads_no_copy_before_it_arrived(depths):
    """Copies run on another stream than the kernels that make wider types of them: without a wait
    these read what was in that memory before."""
    shard = shard_at(random_batch(6), range(6), RankCoords(), depths)
    upload = LateUpload()
    late = Microbatch.of(shard, 0, RankCoords(), depths, upload)
    upload.arrive()
    now = Microbatch.of(shard, 0, RankCoords(), depths)
    for name in ("tokens", "targets", "positions"):
        assert torch.equal(getattr(late, name), getattr(now, name)), name
    assert late.inputs is not None and now.inputs is not None
    assert torch.equal(late.inputs.rollout_logprobs, now.inputs.rollout_logprobs)
    assert all(
        torch.equal(x, y)
        for mine, other in zip(late.mtp, now.mtp, strict=True)
        for x, y in zip(mine, other, strict=True)
    )


def over_sequences(batch: WholeBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """A value of every row, and what it counts for in a loss."""
    g = torch.Generator().manual_seed(5)
    draw = torch.randn(2, len(batch.tokens), generator=g, dtype=torch.float64)
    return draw[0], draw[1]


def means_on_a_rank(group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """(rows, mean of each row's sequence, gradient of their weighted squares) of a rank."""
    batch = random_batch(6)
    place = RankCoords(2, group.rank(), group)
    shard = shard_at(batch, TOGETHER, place)
    rows = shard.rows.tokens
    tokens = np.bincount(shard.lengths.sample_of(np.flatnonzero(batch.loss_mask)), minlength=6)
    shares = batch.loss_mask[rows] / tokens.clip(min=1)[shard.lengths.sample_of(rows)]
    micro = Microbatch.of(shard.with_columns(shares=shares.double()), 0, place)
    values, weights = (x[micro.rows.clamp(min=0)] for x in over_sequences(batch))
    values.requires_grad_()
    assert micro.inputs is not None and micro.inputs.sequences is not None
    means = micro.inputs.sequences.mean(values)
    (torch.where(micro.rows >= 0, weights, 0) * means**2).sum().backward()
    assert values.grad is not None
    return micro.rows, means.detach(), values.grad


def test_of_gives_means_over_sequences_whose_rows_two_ranks_share():
    """Means and their gradient, against a loop over whole samples in one process."""
    batch = random_batch(6)
    values, weights = over_sequences(batch)
    values.requires_grad_()
    means = torch.full_like(values.detach(), torch.nan)
    total = torch.zeros((), dtype=torch.float64)
    stop = np.cumsum(batch.seqlens)
    for i in TOGETHER:
        rows = slice(int(stop[i] - batch.seqlens[i]), int(stop[i]))
        mean = values[rows][batch.loss_mask[rows]].mean()
        total, means[rows] = total + (weights[rows] * mean**2).sum(), mean.detach()
    total.backward()
    assert values.grad is not None
    seen = list[int]()
    for rows, got, grad in run_ranks(means_on_a_rank, 2):
        real = rows >= 0
        seen += rows[real].tolist()
        torch.testing.assert_close(got[real], means[rows[real]])
        torch.testing.assert_close(grad[real], values.grad[rows[real]])
        assert not grad[~real].any()
    assert sorted(seen) == means.isfinite().nonzero()[:, 0].tolist() and len(seen) > 20


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_of_no_samples_is_padding_alone(place):
    """The rank takes part in collectives, and computes no row of the batch."""
    batch = random_batch(2)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    micro = microbatch(batch, (), place, depths=2)
    assert len(micro.rows) == micro.layout.num_local > 0
    assert (micro.rows == -1).all() and (micro.at_router == -1).all()
    assert not micro.tokens.any() and not micro.targets.any()
    assert micro.inputs is not None
    assert not micro.inputs.loss_mask.any() and not micro.inputs.rollout_logprobs.any()
    assert not any(inputs.loss_mask.any() or inputs.tokens.any() for inputs in micro.mtp)
    assert sum(segment.q_len for segment in micro.layout.segments(place.cp_rank)) == len(micro.rows)
