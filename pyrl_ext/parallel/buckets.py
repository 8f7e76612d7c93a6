"""Buckets: buffers of bytes in which named tensors travel from the trainer to an engine.

The format lives in this room because both ends import it: weights/ assembles buckets, and
rollout/process/ sends them; neither could import the other's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 64  # of a tensor in a bucket [bytes]

Named = Iterable[tuple[str, Tensor]]
# Bytes -> uint8 memory of at least that size, free for the next bucket.
Allocate = Callable[[int], Tensor]


class Slot(NamedTuple):
    """The place of one tensor in a buffer.

    Args:
        name:  of the tensor
        dtype: of the tensor
        shape: of the tensor
        start: of its first byte
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in the uint8 ``buffer``."""
        part = buffer[self.start : self.start + self.bytes]
        return part.view(self.dtype).view(self.shape)


class Bucket(NamedTuple):
    """Tensors that lie in one buffer.

    Args:
        slots: in the order of the stream
        bytes: of the buffer that they fill
    """

    slots: tuple[Slot, ...]
    bytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Bucket:
        """(name, dtype, shape) one after the other, each aligned."""
        slots = []
        end = 0
        for name, dtype, shape in tensors:
            slots.append(Slot(name, dtype, tuple(shape), aligned(end)))
            end = slots[-1].start + slots[-1].bytes
        return cls(tuple(slots), end)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in the uint8 ``buffer``, by name."""
        return {slot.name: slot.view(buffer) for slot in self.slots}

    def of_names(self, names: Container[str], buffer: Tensor) -> Bucket:
        """The bucket with the slots of these names only, moved together within its buffer."""
        slots = [slot for slot in self.slots if slot.name in names]
        if len(slots) == len(self.slots):
            return self
        less = Bucket.of((slot.name, slot.dtype, slot.shape) for slot in slots)
        for old, new in zip(slots, less.slots, strict=True):
            if old.start != new.start:
                new.view(buffer).copy_(old.view(buffer).clone())
        return less

    def name_at(self, place: int) -> str:
        """Name of the tensor in which, or before which, a byte lies."""
        return self.slots[max(0, bisect_right(self.slots, place, key=_start) - 1)].name


def _start(slot: Slot) -> int:
    return slot.start


class BucketStream(ABC):
    """Named tensors that are assembled bucket by bucket.

    Iterating yields (name, tensor); these tensors stay valid. `buckets` assembles them in memory
    that the caller allocates, which saves a copy if the caller sends that memory.

    Attributes:
        names: of the tensors that come on this rank; None: not known, all of them come
    """

    names: Set[str] | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def buckets(self, allocate: Allocate) -> Iterator[tuple[Bucket, Tensor]]:
        """Yields each bucket with the memory that holds it, which is from ``allocate`` unless the
        stream keeps its own."""
        ...


def cut(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], bucket_bytes: int
) -> Iterator[Bucket]:
    """(name, dtype, shape) in buckets of at most ``bucket_bytes``; a larger tensor fills one
    alone."""
    held: list[tuple[str, torch.dtype, Sequence[int]]] = []
    end = 0
    for tensor in tensors:
        _, dtype, shape = tensor
        size = math.prod(shape) * dtype.itemsize
        if held and aligned(end) + size > bucket_bytes:
            yield Bucket.of(held)
            held = []
            end = 0
        held.append(tensor)
        end = aligned(end) + size
    if held:
        yield Bucket.of(held)


def from_one_rank(
    layout: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    tensors: Mapping[str, Tensor],
    source: int,
    group: dist.ProcessGroup,
    device: torch.device | str,
    bucket_bytes: int,
) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of one rank on all ranks of a group, in memory that is not filled again.

    Args:
        layout: (name, dtype, shape) of all of them, the same on every rank
        tensors: on rank ``source``; empty on the others

    Communicates: a broadcast for every bucket of at most ``bucket_bytes``, or one larger tensor.
    """
    for bucket in cut(layout, bucket_bytes):
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8, device=device)
        views = bucket.views(buffer)
        for name, view in views.items():
            if name in tensors:
                view.copy_(tensors[name])
        if bucket.bytes:
            dist.broadcast(buffer, source, group=group)
        yield from views.items()


def names_here(named: Named, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that come on this rank."""
    here = named.names if isinstance(named, BucketStream) else None
    return [name for name in names if here is None or name in here]


def buckets_of(
    named: Named, bucket_bytes: int, allocate: Allocate
) -> Iterator[tuple[Bucket, Tensor]]:
    """Named tensors in buckets: those of a `BucketStream`, or packed here.

    Args:
        named: a tensor is copied before the next one is asked for
        bucket_bytes: of a bucket that is packed here; a larger tensor fills a bucket alone
        allocate: called once before each bucket
    """
    if isinstance(named, BucketStream):
        yield from named.buckets(allocate)
        return
    slots: list[Slot] = []
    buffer = torch.empty(0, dtype=torch.uint8)
    used = 0
    for name, tensor in named:
        start = aligned(used)
        if slots and start + tensor.nbytes > bucket_bytes:
            yield Bucket(tuple(slots), used), buffer
            slots = []
            start = 0
        if not slots:
            buffer = allocate(max(tensor.nbytes, bucket_bytes))
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start))
        slots[-1].view(buffer).copy_(tensor.detach())
        used = start + tensor.nbytes
    if slots:
        yield Bucket(tuple(slots), used), buffer


@contextmanager
def read_to_the_end(buckets: Iterable[object]) -> Generator[None]:
    """Read what is left where the block fails: other ranks wait for this one's part in what they
    gather."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            deque(buckets, maxlen=0)
        raise


class KeptBuckets(BucketStream):
    """The buckets of another stream, in host memory that is used again for the next one.

    Args:
        bucket_bytes: of buckets that are packed here
        device: of the tensors
    """

    def __init__(self, bucket_bytes: int, device: torch.device | str = "cpu"):
        self.bucket_bytes = bucket_bytes
        self.device = torch.device(device)
        self._kept: list[tuple[Bucket, Tensor]] = []
        self._memory: list[Tensor] = []

    def take(self, named: Named, wanted: Container[str]) -> KeptBuckets:
        """Keep the tensors of these names; what was kept before is gone.

        Communicates: as ``named`` does, also if it raises. Syncs: once a bucket on a GPU.
        """
        self.names = named.names if isinstance(named, BucketStream) else None
        self._kept = []
        on_device = torch.empty(0, dtype=torch.uint8, device=self.device)

        def allocate(size: int) -> Tensor:
            nonlocal on_device
            if self.device.type == "cpu":
                return self._host(size)
            if on_device.numel() < size:
                on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
            return on_device

        buckets = buckets_of(named, self.bucket_bytes, allocate)
        with read_to_the_end(buckets):
            for bucket, buffer in buckets:
                kept = bucket.of_names(wanted, buffer)
                if not kept.slots:
                    continue
                if buffer.device.type != "cpu":
                    buffer = self._host(kept.bytes)[: kept.bytes].copy_(buffer[: kept.bytes])
                self._kept.append((kept, buffer))
        return self

    def _host(self, size: int) -> Tensor:
        """Memory for the next bucket that is kept."""
        number = len(self._kept)
        if number == len(self._memory) or self._memory[number].numel() < size:
            pinned = self.device.type != "cpu"
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._memory[number : number + 1] = [memory]
        return self._memory[number]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, buffer in self._kept:
            yield from bucket.views(buffer).items()

    def buckets(self, allocate: Allocate) -> Iterator[tuple[Bucket, Tensor]]:
        """As they are kept."""
        for kept in self._kept:
            allocate(0)  # for whoever counts on it: what came before may be on its way
            yield kept


Note = Callable[[Mapping[str, Tensor]], None]


def observed(named: Named, note: Note) -> Named:
    """``named``, with a call of ``note`` for the tensors of every bucket before it is passed on;
    for every tensor where they do not come in buckets."""
    if isinstance(named, BucketStream):
        return _Observed(named, note)
    return _noting(named, note)


class _Observed(BucketStream):
    def __init__(self, stream: BucketStream, note: Note):
        self.stream = stream
        self.note = note
        self.names = stream.names

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return _noting(self.stream, self.note)

    def buckets(self, allocate: Allocate) -> Iterator[tuple[Bucket, Tensor]]:
        for bucket, buffer in self.stream.buckets(allocate):
            self.note(bucket.views(buffer))
            yield bucket, buffer


def _noting(named: Named, note: Note) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        note({name: tensor})
        yield name, tensor


def aligned(size: int) -> int:
    """``size`` [bytes] rounded up to the alignment of a slot."""
    return -(-size // ALIGNMENT) * ALIGNMENT
