"""Images: every row of an image goes from one replica to the one rank that embeds it; compared with
a plain loop over ranks and rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.pack.encoder_work import EncoderWork, PatchStream, ShardImages
from pyrl_ext.pack.images import Images, spread
from pyrl_ext.pack.rank_rows import Lengths, RankRole
from pyrl_ext.pack.schedule import within_patches
from pyrl_ext.schedule import Group, Schedule, plan_microbatches
from pyrl_ext.schedule.cp_problem import CostModel
from tests.helpers.dynamic_cp import planned
from tests.helpers.probe import local_rows

KEY = "modules.vision.patches_per_microbatch"


@st.composite
def steps(draw):
    """(images, lengths) of a step; some samples without images, some with several."""
    lengths = []
    table = []
    for sample in range(draw(st.integers(1, 14))):
        length = draw(st.integers(1, 9))
        for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
            rows = draw(st.integers(1, 12))
            table.append((sample, length, rows, (1, 2 * rows, 2)))
            length += rows + draw(st.integers(0, 3))
        lengths.append(length)
    seqlens = np.asarray(lengths, np.int32)
    starts = np.concatenate([[0], np.cumsum(seqlens, dtype=np.int64)])
    columns = zip(*table, strict=True) if table else ([], [], [], np.empty((0, 3)))
    return Images(*(np.asarray(c, np.int64) for c in columns)), Lengths(seqlens, starts)


def schedule_of(lengths: Lengths, way: str) -> tuple[Schedule, int]:
    """A schedule and tensor-parallel ranks that share rows."""
    dp, cp, tp, dynamic = map(int, way.split())
    unit = (2 * cp if cp > 1 else 1) * tp
    seqlens = lengths.seqlens.tolist()
    limit = max(64, -(-max(seqlens) // unit) * unit)
    if dynamic:
        cost = CostModel(token_seconds=1.0, square_seconds=0.01)
        plan = planned(
            seqlens, dp * cp, limit, cost=cost, min_cp_size=cp, max_cp_size=dynamic, tp_size=tp
        )
        return plan, tp
    return plan_microbatches(seqlens, dp, limit, unit, cp), tp


@given(
    step=steps(),
    way=st.sampled_from(["1 1 1 0", "3 1 1 0", "1 2 1 0", "1 1 2 0", "2 2 2 0", "4 1 2 4"]),
    replicas=st.integers(1, 4),
    depth=st.sampled_from([0, 0, 1, 2]),
)
@settings(max_examples=300, deadline=None)
def test_route_brings_each_row_of_an_image_to_the_rank_that_embeds_it(step, way, replicas, depth):
    images, lengths = step
    schedule, tp = schedule_of(lengths, way)
    work = EncoderWork(images, schedule, lengths, replicas)
    batch: Any = SimpleNamespace(seqlens=lengths.seqlens.tolist())
    of_image = {  # row of the stream that embeds it: at depth d, d rows earlier in the sample
        int(lengths.starts[s]) + first + i - depth: (image, i)
        for image, (s, first, n) in enumerate(zip(*images[:3], strict=True))
        for i in range(n)
        if first + i >= depth
    }
    arrived = []
    for m in range(len(schedule)):
        outputs = [
            [(image, i) for image in work.ids(m, r).tolist() for i in range(images.counts[image])]
            for r in range(replicas)
        ]
        for rank in range(schedule.num_ranks):
            group = schedule.group_of(m, rank)
            place = SimpleNamespace(
                cp_size=group.cp_size, cp_rank=rank - group.first, tp_size=tp, tp_rank=0
            )
            rows = local_rows(batch, group.samples, place)
            for t in range(tp):
                part = rows[t * len(rows) // tp : (t + 1) * len(rows) // tp]
                want = {at: of_image[row] for at, row in enumerate(part) if row in of_image}
                found = {}
                for r in range(replicas):
                    route = work.route(m, r, RankRole(rank, t, tp), depth)
                    for source, dest in zip(*(x.tolist() for x in route), strict=True):
                        assert dest not in found
                        found[dest] = outputs[r][source]
                    assert route.dest.tolist() == sorted(route.dest.tolist())
                assert found == want
                arrived += found.values()
    assert sorted(arrived) == sorted(of_image.values())


def check_patches(
    held: ShardImages, whole: EncoderWork, replica: int, numbers: range, pixels: torch.Tensor
) -> None:
    """``held`` has microbatches ``numbers`` of ``whole``, by a loop over images."""
    images = whole.images
    first = np.cumsum([0, *whole.images.patches]).tolist()
    for at, number in reversed([*enumerate(numbers)]):
        patches, grids, rows = held.microbatch(at, replica)
        assert patches is not None
        ids = whole.ids(number, replica).tolist()
        if not ids:  # an image of zeros, of which no row counts
            assert patches.shape == (4, 3) and not patches.any()
            assert (grids, rows) == ([(1, 2, 2)], 0)
            continue
        want = [first[i] + n for i in ids for n in range(int(images.patches[i]))]
        assert torch.equal(patches, pixels[want])
        assert grids == [tuple(images.grids[i]) for i in ids]
        assert rows == images.counts[ids].sum()


@given(
    step=steps(), way=st.sampled_from(["1 1 1 0", "3 1 1 0", "2 2 2 0"]), replicas=st.integers(1, 3)
)
@settings(max_examples=100, deadline=None)
def test_PatchStream_has_the_patches_of_a_replica_in_the_order_of_its_microbatches(
    step, way, replicas
):
    images, lengths = step
    schedule, _ = schedule_of(lengths, way)
    whole = EncoderWork(images, schedule, lengths, replicas)
    owners = (images.samples % 3).astype(np.int32)
    stream = PatchStream("vision", whole, owners, 3, 2)
    pixels = torch.randn(int(images.patches.sum()), 3)
    num = len(schedule)
    of_row = np.repeat(owners, images.patches)
    for replica in range(replicas):
        need = stream.need(replica, np.arange(num + 1))
        assert need.cuts[0] == 0 and need.cuts[-1] == len(need.rows)
        held = stream.images(replica, {"patches": pixels[need.rows]})
        assert held.firsts.tolist() == need.cuts.tolist()
        check_patches(held, whole, replica, range(num), pixels)
        for owner in range(3):
            part = stream.need(replica, np.asarray([0, num]), owner)
            mine = of_row[need.rows] == owner
            assert part.rows.tolist() == need.rows[mine].tolist()
            assert part.cuts.tolist() == [0, mine.sum()]
        middle = held.between(num // 3, num - num // 4)
        check_patches(middle, whole, replica, range(num // 3, num - num // 4), pixels)
    patches, grids, rows = stream.images(-1, {}).microbatch(0, 0)  # on a later stage
    assert patches is None and grids and rows == len(whole.rows(0, 0))


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), replicas=st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_spread_gives_the_largest_image_to_the_replica_with_least(sizes, replicas):
    """The first of equal images, and of equal replicas: every rank finds the same."""
    loads = [0] * replicas
    want = [list[int]() for _ in range(replicas)]
    for size, image in sorted((-size, image) for image, size in enumerate(sizes)):
        replica = loads.index(min(loads))
        want[replica].append(image)
        loads[replica] -= size
    assert spread(np.asarray(sizes, np.int64), replicas) == [sorted(part) for part in want]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(step=steps(), replicas=st.integers(1, 3), limit=st.integers(48, 400))
@settings(max_examples=200, deadline=None)
def test_within_patches_keeps_samples_on_their_ranks_and_replicas_below_the_limit(
    step, replicas, limit
):
    images, lengths = step
    schedule, _ = schedule_of(lengths, "2 1 1 0")
    per_sample = [images.patches[images.samples == s].tolist() for s in range(len(lengths.seqlens))]
    limit = max(limit, max(map(sum, per_sample)))
    small = within_patches(schedule, images, replicas, limit, KEY)
    where = {i: g.first for groups in schedule.microbatches for g in groups for i in g.samples}
    after = [(i, g.first) for groups in small.microbatches for g in groups for i in g.samples]
    assert sorted(after) == sorted(where.items())
    work = EncoderWork(images, small, lengths, replicas)
    for m in range(len(small)):
        for r in range(replicas):
            assert images.patches[work.ids(m, r)].sum() <= limit
    if all(sum(p) == 0 for p in per_sample):
        assert small == schedule


def test_within_patches_splits_into_as_few_parts_as_hold_the_patches():
    grids = np.asarray([(1, 4, 4)] * 6)
    images = Images(np.arange(6), np.zeros(6, np.int64), np.full(6, 4), grids)
    schedule = Schedule(2, ((Group(0, 1, (0, 1, 2)), Group(1, 1, (3, 4, 5))),))
    assert len(within_patches(schedule, images, 2, 48, KEY)) == 1
    assert len(within_patches(schedule, images, 2, 32, KEY)) == 2
    assert len(within_patches(schedule, images, 1, 16, KEY)) == 6
    unlike = Images(*images[:3], grids=grids * [1, 3, 1] ** (np.arange(6) == 1)[:, None])
    assert len(within_patches(Schedule(2, schedule.microbatches[:1]), unlike, 1, 64, KEY)) == 2
    idle = Schedule(2, (*schedule.microbatches, (Group(0, 1, ()), Group(1, 1, ()))))
    assert len(within_patches(idle, images, 2, 32, KEY)) == 3


def test_table_holds_the_numbers_of_images_of_a_long_step():
    numbers = np.asarray([(0, 70_000, 6, 1, 4, 6), (100_000, 2**20, 2**14, 1, 256, 256)])
    images = Images.of(numbers.reshape(-1))
    assert images.table.dtype == np.int32 and (images.table == numbers).all()
    assert (Images.of(images.table).grids == numbers[:, 3:]).all()
    assert images.patches.tolist() == [24, 65536]


def test_within_patches_names_a_sample_that_is_too_much_alone():
    images = Images(
        np.asarray([0, 1, 1]),
        np.asarray([0, 0, 4]),
        np.asarray([4, 4, 4]),
        np.asarray([(1, 4, 4), (1, 4, 4), (2, 8, 8)]),
    )
    schedule = Schedule(1, ((Group(0, 1, (0, 1)),),))
    with pytest.raises(
        ValueError, match=rf"sample 1 has images of \[16, 128\] patches.*at most {KEY} 64"
    ):
        within_patches(schedule, images, 2, 64, KEY)
