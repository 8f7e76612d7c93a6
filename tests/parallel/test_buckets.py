"""Buckets of weights that are kept while they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.parallel import buckets
from pyrl_ext.parallel.buckets import (
    Allocate,
    Bucket,
    BucketStream,
    KeptBuckets,
    buckets_of,
    cut,
    from_one_rank,
)
from tests.helpers.ranks import run_ranks

SHAPES = {f"w{i}": (3, 5 + i) for i in range(9)}


def weights(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


class Gathered(BucketStream):
    """Tensors that every iteration puts into memory again; ``read`` counts them."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors
        self.read = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.read = 0
        for each in self.tensors.items():
            self.read += 1
            yield each

    def buckets(self, allocate: Allocate) -> Iterator[tuple[Bucket, Tensor]]:
        yield from buckets_of(iter(self), 300, allocate)


def found(stream: BucketStream) -> dict[str, Tensor]:
    """By name, as whoever sends the buckets sees them."""
    asked: list[int] = []

    def allocate(size: int) -> Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    tensors = {
        slot.name: slot.view(buffer).clone()
        for bucket, buffer in stream.buckets(allocate)
        for slot in bucket.slots
    }
    assert len(asked) > 1
    return tensors


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[n], others[n]) for n in some)


def test_KeptBuckets_has_the_tensors_of_a_stream_as_often_as_it_is_asked():
    kept = KeptBuckets(300)
    for seed, wanted in ((0, [*SHAPES]), (1, ["w0", "w2", "w5", "w8"]), (2, [*SHAPES])):
        sent = weights(seed)
        kept.take(Gathered(sent), wanted)
        for tensor in sent.values():
            tensor.zero_()  # the trainer goes on
        expected = {name: tensor for name, tensor in weights(seed).items() if name in wanted}
        for _ in "ab":
            assert same(found(kept), expected) and same(dict(kept), expected)


def test_KeptBuckets_uses_its_memory_again():
    kept = KeptBuckets(300)
    first, second = (
        {tensor.data_ptr() for _, tensor in kept.take(Gathered(weights(seed)), SHAPES)}
        for seed in (0, 1)
    )
    assert first == second


def test_KeptBuckets_reads_the_whole_stream_where_it_fails(monkeypatch: pytest.MonkeyPatch):
    """Other ranks gather with this one."""
    stream = Gathered(weights(0))
    kept = KeptBuckets(300)

    def full(*_: object) -> Bucket:
        raise MemoryError

    monkeypatch.setattr(Bucket, "of_names", full)
    with pytest.raises(MemoryError):
        kept.take(stream, SHAPES)
    assert stream.read == len(SHAPES)


MIXED = {
    "a": torch.arange(15.0).view(3, 5),
    "none": torch.zeros(0, 4, dtype=torch.bfloat16),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "large": torch.arange(100.0),
    "flags": torch.tensor([True, False]),
}


def test_cut_fills_buckets_up_to_their_size():
    layout = [(name, t.dtype, t.shape) for name, t in MIXED.items()]

    def names(size: int) -> list[list[str]]:
        return [[slot.name for slot in bucket.slots] for bucket in cut(layout, size)]

    assert names(128) == names(78) == [["a", "none", "b"], ["large"], ["flags"]]
    assert names(77) == [["a", "none"], ["b"], ["large"], ["flags"]]
    assert [bucket.bytes for bucket in cut(layout, 128)] == [78, 400, 2]
    assert len([*cut(layout, 2**20)]) == 1 and not [*cut([], 128)]


def hand_on(group: Any) -> tuple[dict[str, Tensor], int]:
    """The tensors that a rank gets from rank 1, and the number of broadcasts."""
    layout = [(name, t.dtype, tuple(t.shape)) for name, t in MIXED.items()]
    own = MIXED if dist.get_rank() == 1 else {}
    with patch.object(buckets.dist, "broadcast", wraps=dist.broadcast) as broadcast:
        found = dict(from_one_rank(layout, own, 1, group, "cpu", 128))
    return {name: tensor.clone() for name, tensor in found.items()}, broadcast.call_count


@pytest.mark.multiprocess
def test_from_one_rank_gives_all_ranks_its_tensors_in_buckets():
    for found, broadcasts in run_ranks(hand_on, 3):
        assert [*found] == [*MIXED] and broadcasts == 3
        for name, tensor in found.items():
            assert tensor.dtype == MIXED[name].dtype and torch.equal(tensor, MIXED[name])
