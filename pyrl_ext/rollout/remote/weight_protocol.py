"""Messages and frames by which named tensors cross a network from the trainer to remote engines.

An engine connects to each sender (a rank of the trainer) and sends a key that it got over HTTP.
Then frames come: buckets of tensors, and an end. A frame is a head of fixed size, a description in
JSON, and the bytes of its tensors, or of what changed in them since the weight sync before. These
bytes come over the same connection or by a broadcast. Nothing is pickled. The engine compares a
description with the tensors that it holds before it allocates memory, so a sender cannot make it
allocate more than those take in float32, next to the bytes that it kept. Bytes are encrypted with
``rollout.tls`` only. Without it the network has to be private: the digest of each bucket and its
description finds faults, not forgery.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from pyrl_ext.ops.digest import digest
from pyrl_ext.parallel.buckets import Bucket
from pyrl_ext.rollout.remote.changes import CHANGE_BYTES, apply_changes
from pyrl_ext.rollout.remote.protocol import first_fault

NO_BASE = "they do not fit what the engine holds"  # in the reason of engines that need all bytes
MAGIC = b"pyrl weights 7\r\n"
KEY_BYTES = 32
HELLO = struct.Struct(f"<{len(MAGIC)}sI{KEY_BYTES}s")  # magic, number of the engine, key
HEAD = struct.Struct("<IQ")  # size of the description, size of the tensors [bytes]
# shares of the sender's limit for all bytes
SILENCE_SHARE = 2.0  # longest silence of a sender: it may wait for another engine
BROADCAST_SHARE = 0.25  # in which an engine of a broadcast has to take some bytes
CHUNK = 4 << 20  # bytes after which the position in a bucket is noted
CONNECT_TIMEOUT_S = 10.0  # for a connection and its first bytes
MAX_DESCRIPTION = 1 << 24  # [bytes]
MAX_SENDERS = 1024
MAX_MEMBERS = 1024  # of a broadcast's group
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

Size = Sequence[int]
Port = Annotated[int, Field(gt=0, lt=2**16)]
Seconds = Annotated[float, Field(gt=0, lt=2**31)]
# Fills the memory with the bytes that come next; raises TransferError if they do not come.
Read = Callable[[memoryview], None]


class TransferError(RuntimeError):
    """A transfer of weights that failed; nothing that came of it is used."""


def require(ok: bool, fault: str, rule: str) -> None:
    """Raises TransferError unless ``ok``."""
    if not ok:
        raise TransferError(f"weights: {fault}, expected {rule}; the received part is dropped")


class Message(BaseModel):
    """A message with exactly its fields, each of its type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """The message in a JSON text. Raises: TransferError naming the first wrong field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            fault = f"{cls.__name__}: {first_fault(error)}"
            raise TransferError(f"weights: {fault}; the received part is dropped") from None


class SenderAddress(Message):
    """The place where one rank of the trainer waits for an engine.

    Args:
        rank: of the trainer
        host, port: where it waits
        key: that only this rank and this engine know, in hexadecimal digits
        certificate: digest of the certificate by which the rank is known, see `Certificate`; None:
            bytes are not encrypted
    """

    rank: int
    host: str
    port: Port
    key: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
    certificate: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None


class BroadcastRoute(Message):
    """The process group through which the bytes of the only sender come.

    Args:
        host, port: of the group's store
        prefix: of the group's names in the store, which others do not know
        backend: of the group
        rank, size: of this member in the group, and of the group; rank 0 sends
        silence: longest time without a byte of the group [seconds]
    """

    host: Annotated[str, Field(min_length=1)]
    port: Port
    prefix: str
    backend: Literal["gloo", "nccl"]
    rank: Annotated[int, Field(ge=0, lt=MAX_MEMBERS)]
    size: Annotated[int, Field(ge=2, le=MAX_MEMBERS)]
    silence: Seconds


class UpdateInfo(Message):
    """The update info that an engine gets over HTTP: the sources of its weights, and their version.

    Args:
        senders: ranks that send a part of the weights
        engine: number of this engine at the senders
        version: of the weights
        silence: longest time without a byte of a sender [seconds]
        only: names of the tensors that come, the others stay; None: all
        broadcast: the way of the bytes of tensors; None: over the connection to each sender
        base: number of the sync before, of whose bytes changes may come; None: all bytes come
        keep: number under which the engine keeps all bytes, from which the next sync may send
            changes; None: it keeps none
    """

    senders: Annotated[list[SenderAddress], Field(min_length=1, max_length=MAX_SENDERS)]
    engine: Annotated[int, Field(ge=0, lt=2**32)]
    version: int
    silence: Seconds
    only: list[str] | None = None
    broadcast: BroadcastRoute | None = None
    base: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    keep: Annotated[str, Field(min_length=1, max_length=64)] | None = None


class TensorDescription(NamedTuple):
    """One tensor of a bucket."""

    name: Annotated[str, Field(max_length=512)]
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: list[int]


class Description(Message):
    """The description of a bucket, or, without tensors, of a sender's end.

    Args:
        number: of the frame, from 0 on
        version: of the weights
        tensors: in the order of their bytes
        digest: see `bucket_digest`; at the end the `names_digest` of all tensors of this sender
        base: digest of the bucket of the sync before, of which the changes come; None: all bytes
            come
    """

    number: int
    version: int
    tensors: list[TensorDescription]
    digest: str
    base: str | None = None


def bucket_digest(tensors: Sequence[TensorDescription], buffer: Tensor) -> str:
    """SHA-256 of a bucket's descriptions and of the digest of all its bytes. Syncs: once."""
    return hashlib.sha256(json.dumps([tensors, digest(buffer)]).encode()).hexdigest()


def names_digest(shapes: Mapping[str, Size]) -> str:
    """SHA-256 of names and shapes, whatever their order."""
    lines = sorted(f"{name} {list(shape)}" for name, shape in shapes.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# sending -----------------------------------------------------------------------------------------


def engine_of(greeting: bytes, keys: Sequence[str]) -> int | None:
    """Number of the engine that sent this greeting; None: its key is not the engine's.

    Args:
        keys: of the engines, by number
    """
    magic, engine, key = HELLO.unpack(greeting)
    if magic != MAGIC or engine >= len(keys):
        return None
    expected: str = keys[int(engine)]
    return engine if hmac.compare_digest(key, bytes.fromhex(expected)) else None


def described(bucket: Bucket) -> list[TensorDescription]:
    """The descriptions of a bucket's tensors."""
    tensors: list[TensorDescription] = []
    for slot in bucket.slots:
        dtype: Any = str(slot.dtype)[6:]
        tensors.append(TensorDescription(slot.name, dtype, list(slot.shape)))
    return tensors


def bucket_frame(
    number: int,
    version: int,
    tensors: list[TensorDescription],
    known: str,
    size: int,
    base: str | None = None,
) -> bytes:
    """The head and the description of a bucket, before its bytes or its changes.

    Args:
        tensors, known: descriptions and digest, see `described` and `bucket_digest`
        size: of what follows [bytes]
        base: see `Description`
    """
    # not checked: the engine names a tensor that it does not take
    description = Description.model_construct(
        number=number, version=version, tensors=tensors, digest=known, base=base
    )
    text = description.model_dump_json(warnings=False).encode()
    assert len(text) <= MAX_DESCRIPTION, f"a bucket whose names take {len(text)} bytes"
    return HEAD.pack(len(text), size) + text


def end_frame(number: int, version: int, shapes: Mapping[str, Size]) -> bytes:
    """The frame after a sender's last bucket."""
    return bucket_frame(number, version, [], names_digest(shapes), 0)


# receiving ---------------------------------------------------------------------------------------


class IncomingTensors:
    """The tensors of one transfer, from any number of senders at once, each verified.

    Args:
        wanted: name -> shape of the tensors that have to come, each exactly once
        version: of them
        held: digest -> bytes of a bucket of the sync before; those of which changes come are taken
            out and changed in place

    Attributes:
        buckets: digest -> bytes of each bucket that came
    """

    def __init__(
        self, wanted: Mapping[str, Size], version: int, held: dict[str, Tensor] | None = None
    ):
        self.wanted = wanted
        self.version = version
        self.buckets = dict[str, Tensor]()
        self._held = {} if held is None else held
        self._claimed = dict[str, object]()
        self._received = dict[str, Tensor]()

    def take(self, read: Read, payload: Read, note: Callable[[str], object]) -> None:
        """All frames of one sender; each sender's in a thread.

        Args:
            read: gives the bytes of the frames
            payload: gives the bytes of their tensors
            note: called with the name of each tensor before its bytes are read

        Raises: TransferError naming what is wrong; what ``read`` does.
        """
        tensors = dict[str, Tensor]()
        count = 0
        while True:
            size, payload_size = HEAD.unpack(_bytes(read, HEAD.size))
            rule = f"at most {MAX_DESCRIPTION}"
            require(size <= MAX_DESCRIPTION, f"a description of {size} bytes", rule)
            frame = Description.parse(_bytes(read, size))
            require(frame.number == count, f"frame {frame.number}", f"{count}")
            require(frame.version == self.version, f"version {frame.version}", f"{self.version}")
            if not frame.tensors:
                shapes = {name: self.wanted[name] for name in tensors}
                good = payload_size == 0 and frame.digest == names_digest(shapes)
                require(good, f"an end after {len(tensors)} tensors", "all that the sender names")
                self._received |= tensors
                return
            tensors |= self._bucket(payload, note, frame, payload_size)
            count += 1

    def complete(self) -> dict[str, Tensor]:
        """All tensors, in the order of ``wanted``. Raises: TransferError if one is missing."""
        missing = [name for name in self.wanted if name not in self._received]
        require(not missing, f"{len(missing)} tensors missing, {missing[:4]}", "all that it holds")
        return {name: self._received[name] for name in self.wanted}

    def _bucket(
        self, read: Read, note: Callable[[str], object], frame: Description, size: int
    ) -> dict[str, Tensor]:
        tensors = frame.tensors
        for name, _, shape in tensors:
            self._claim(name, shape)
        bucket = Bucket.of((name, DTYPES[dtype], shape) for name, dtype, shape in tensors)
        if frame.base is None:
            require(size == bucket.bytes, f"{size} bytes of tensors", f"{bucket.bytes}")
            buffer = _data(read, note, bucket, size)
            good = True
        else:
            buffer = self._held.pop(frame.base, None)
            held = buffer is not None and len(buffer) == bucket.bytes
            require(held, f"changes from {tensors[0].name} on, but {NO_BASE}", "all bytes")
            assert buffer is not None
            fits = 0 < size < bucket.bytes and size % CHANGE_BYTES == 0
            rule = f"a multiple of {CHANGE_BYTES} below {bucket.bytes}"
            require(fits, f"{size} bytes of changes", rule)
            good = apply_changes(buffer, _data(read, note, bucket, size))
        names = f"the {len(tensors)} tensors from {tensors[0].name} to {tensors[-1].name}"
        good = good and frame.digest == bucket_digest(tensors, buffer)
        require(good or frame.base is None, f"{names} with changes, but {NO_BASE}", "all bytes")
        require(good, f"{names} with another digest", "the one with which they left the trainer")
        self.buckets[frame.digest] = buffer
        return {slot.name: slot.view(buffer) for slot in bucket.slots}

    def _claim(self, name: str, shape: list[int]) -> None:
        require(name in self.wanted, f"{name!r}", "a tensor that the engine holds")
        claim = object()  # one step, also while other senders claim: the first has the name
        first = self._claimed.setdefault(name, claim) is claim
        require(first, f"{name} twice", "each tensor once")
        expected = list(self.wanted[name])
        require(shape == expected, f"{name} of shape {str(shape)[:200]}", f"{expected}")


def _data(read: Read, note: Callable[[str], object], bucket: Bucket, size: int) -> Tensor:
    """The bytes that follow the description of a bucket, or the changes of these bytes."""
    buffer = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, CHUNK):
        note(name_of(bucket, start, size))
        read(memoryview(buffer[start : start + CHUNK].numpy()))
    return buffer


def name_of(bucket: Bucket, place: int, size: int) -> str:
    """Name of the tensor at byte ``place`` of the ``size`` bytes sent of a bucket; about, if they
    are changes."""
    return bucket.name_at(place * bucket.bytes // size)


def _bytes(read: Read, size: int) -> bytes:
    data = bytearray(size)
    read(memoryview(data))
    return bytes(data)
