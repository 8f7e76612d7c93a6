"""Frames of tensors: everything arrives, and nothing else is taken, whatever bytes come."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyrl_ext.ops.digest import digest
from pyrl_ext.parallel.buckets import Bucket, buckets_of
from pyrl_ext.rollout.remote import weight_protocol as protocol
from pyrl_ext.rollout.remote.changes import changes_between
from pyrl_ext.rollout.remote.weight_protocol import TransferError

TENSORS: dict[str, Tensor] = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5.0).to(torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 7),
    "last": torch.arange(40.0).to(torch.float16).view(2, 20),
}
WANTED = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
# what the tensors take in float32, each aligned
BOUND = sum(-(-4 * t.numel() // 64) * 64 for t in TENSORS.values())


def frames(tensors: dict[str, Tensor] = TENSORS) -> list[bytes]:
    found = list[bytes]()
    number = 0
    allocate: Callable[[int], Tensor] = lambda size: torch.zeros(size, dtype=torch.uint8)  # noqa: E731
    for bucket, buffer in buckets_of(tensors.items(), 60, allocate):
        data = buffer[: bucket.bytes]
        described = protocol.described(bucket)
        known = protocol.bucket_digest(described, data)
        head = protocol.bucket_frame(number, 3, described, known, bucket.bytes)
        found.append(head + data.numpy().tobytes())
        number += 1
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return [*found, protocol.end_frame(number, 3, shapes)]


class Stream:
    """Bytes of a connection that then closes."""

    def __init__(self, data: bytes):
        self.data = data
        self.place = 0

    def read(self, view: memoryview) -> None:
        part = self.data[self.place : self.place + len(view)]
        protocol.require(len(part) == len(view), "an end", "bytes")
        view[:] = part
        self.place += len(part)


def receive(data: bytes, version: int = 3) -> dict[str, Tensor]:
    incoming = protocol.IncomingTensors(WANTED, version)
    incoming.take(read := Stream(data).read, read, [].append)
    return incoming.complete()


def test_receive_returns_what_was_sent():
    found = receive(b"".join(frames()))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


whole = b"".join(frames())


def test_IncomingTensors_takes_each_tensor_from_one_sender_alone():
    incoming = protocol.IncomingTensors(WANTED, 3)
    incoming.take(read := Stream(whole).read, read, [].append)
    with pytest.raises(TransferError, match="a twice, expected each tensor once"):
        incoming.take(read := Stream(whole).read, read, [].append)


def changed(base: Tensor, new: Tensor, size: int | None = None, data: bytes | None = None) -> bytes:
    """The frames of one tensor of which changes are sent."""
    bucket = Bucket.of([("last", new.dtype, new.shape)])
    described = protocol.described(bucket)
    before, after = (t.contiguous().view(-1).view(torch.uint8) for t in (base, new))
    changes = changes_between(before, after)
    assert changes is not None
    data = changes.numpy().tobytes() if data is None else data
    known, last = (protocol.bucket_digest(described, each) for each in (after, before))
    size = len(data) if size is None else size
    frame = protocol.bucket_frame(0, 3, described, known, size, last)
    return frame + data + protocol.end_frame(1, 3, {"last": tuple(new.shape)})


def receive_changes(data: bytes, held: Tensor | None) -> Tensor:
    bucket = Bucket.of([("last", torch.float16, (2, 20))])
    buckets = dict[str, Tensor]()
    if held is not None:
        memory = held.clone().view(-1).view(torch.uint8)
        buckets[protocol.bucket_digest(protocol.described(bucket), memory)] = memory
    incoming = protocol.IncomingTensors({"last": (2, 20)}, 3, buckets)
    incoming.take(read := Stream(data).read, read, [].append)
    assert not buckets and len(incoming.buckets) == 1  # the one before became the new one
    return incoming.complete()["last"]


def test_receive_changes_the_bucket_that_it_holds():
    old = TENSORS["last"]
    new = old.clone()
    new[1, 3] = 9.0
    new[0, 0] = -1.0
    good = changed(old, new)
    assert torch.equal(receive_changes(good, old), new)
    for held in (None, new, old + 1):
        with pytest.raises(
            TransferError,
            match="last on, but they do not fit what the engine",
        ):
            receive_changes(good, held)
    for size in (0, 2, 80, 2**63):
        with pytest.raises(TransferError, match=r"bytes of changes, expected a multiple of 4"):
            receive_changes(changed(old, new, size), old)
    for distances in ([1, 23, 15], [1, 23, 17]):  # another value; the last word is outside
        wrong = np.array([*distances, 1, 2, 3], dtype=np.uint16).tobytes()
        with pytest.raises(TransferError, match="with changes, but they do not fit"):
            receive_changes(changed(old, new, data=wrong), old)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The frames, cut off, with changed bytes, in another order, or with other frames between."""
    parts = draw(st.permutations(frames())) if draw(st.booleans()) else frames()
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), draw(st.sampled_from([*parts, b"junk"])))
    if draw(st.booleans()):
        parts.pop(draw(st.integers(0, len(parts) - 1)))
    data = bytearray(b"".join(parts))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        data[place : place + 1] = draw(st.binary(min_size=0, max_size=9))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


NUMBERS = st.one_of(st.integers(), st.floats(), st.text(max_size=4), st.none(), st.booleans())
ANYTHING = st.recursive(
    NUMBERS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
)


@st.composite
def described(draw: st.DrawFn) -> bytes:
    """A frame that describes anything, with the bytes of a tensor."""
    tensor = st.tuples(
        st.sampled_from([*WANTED, "z"]) | NUMBERS,
        st.sampled_from([*protocol.DTYPES, "int8"]) | NUMBERS,
        st.sampled_from([list(shape) for shape in WANTED.values()]) | ANYTHING,
    ).map(list)
    fields = {"number": draw(st.just(0) | NUMBERS), "tensors": draw(st.lists(tensor) | ANYTHING)}
    fields |= {"digest": draw(ANYTHING), "version": draw(st.just(3) | NUMBERS)}
    text = json.dumps(draw(st.just(fields) | ANYTHING)).encode()
    sizes = st.sampled_from([len(text), 0, 2**32 - 1])
    payload = draw(st.sampled_from([0, 64, 2**63]))
    return protocol.HEAD.pack(draw(sizes), payload) + text + bytes(200)


class Allocations:
    """Sizes of the memory that torch is asked for."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.total = 0
        empty = torch.empty

        def counted(*args, **kwargs):
            found = empty(*args, **kwargs)
            self.total += found.nbytes
            return found

        patch.setattr(protocol.torch, "empty", counted)


@settings(max_examples=150, deadline=None)
@given(data=damaged() | described() | st.binary(max_size=200))
def test_receive_takes_all_or_nothing_of_any_bytes(data: bytes):
    """It raises nothing but TransferError, allocates no more than the tensors have, and takes no
    tensor that differs from those that were sent."""
    with pytest.MonkeyPatch.context() as patch:
        asked = Allocations(patch)
        try:
            found = receive(data)
        except TransferError:
            found = None
        assert asked.total <= BOUND
    if found is not None:
        assert found.keys() == TENSORS.keys()
        assert all(digest(found[name]) == digest(tensor) for name, tensor in TENSORS.items())


def test_receive_bounds_what_it_reads_before_it_reads_it():
    for head in (
        protocol.HEAD.pack(protocol.MAX_DESCRIPTION + 1, 0),
        struct.pack("<IQ", 2, 9),
    ):
        with pytest.raises(TransferError, match="expected"):
            receive(head + b"{}" + bytes(64))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("b"), r"1 tensors missing, \['b'\]"),
        (
            lambda t: t.update(more=torch.zeros(1)),
            "'more', expected a tensor that the engine holds",
        ),
        (lambda t: t.update(a=torch.zeros(4, 3)), r"a of shape \[4, 3\], expected \[3, 4\]"),
        (
            lambda t: t.update(b=torch.zeros(5, dtype=torch.int32)),
            "tensors.0.1 is 'int32', expected 'float32'",
        ),
    ],
)
def test_receive_names_what_differs(change: Callable[[dict[str, Tensor]], object], says: str):
    tensors = dict(TENSORS)
    change(tensors)
    with pytest.raises(TransferError, match=says):
        receive(b"".join(frames(tensors)))


def test_receive_refuses_another_version_and_a_changed_byte():
    with pytest.raises(TransferError, match="version 3, expected 4"):
        receive(whole, version=4)
    place = whole.index(TENSORS["a"].numpy().tobytes()) + 5
    with pytest.raises(TransferError, match="the 1 tensors from a to a with another digest"):
        receive(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    pair = {"a": torch.zeros(2), "b": torch.ones(2)}
    names = {b'["a"': b'["?"', b'["b"': b'["a"', b'["?"': b'["b"'}
    data = b"".join(frames(pair))
    for name, other in names.items():  # the bytes stay, and who has which is exchanged
        data = data.replace(name, other)
    with pytest.raises(TransferError, match="the 1 tensors from b to b with another digest"):
        protocol.IncomingTensors(dict.fromkeys(pair, (2,)), 3).take(
            read := Stream(data).read, read, [].append
        )
    first, second, *rest = frames()
    with pytest.raises(TransferError, match="frame 1, expected 0"):
        receive(b"".join([second, first, *rest]))
