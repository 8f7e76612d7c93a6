"""Weights to an engine in another process: a sender and its readers, with two buffers in turn.

The sender fills one buffer while the readers empty the other. A reader requests each bucket over a
socket; requesting the next one acknowledges the previous one. The answer is the bucket (names,
types, shapes, places), and its bytes come through the `Channel`. A socket that closes ends the
transfer on both sides. If the engine consists of several processes, each of them reads everything.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyrl_ext.parallel.buckets import Bucket, Named, buckets_of
from pyrl_ext.rollout.process.channel import (
    Broadcast,
    Channel,
    CudaIpc,
    Kind,
    SharedMemory,
    recv,
    send,
)

Readable = Connection | socket.socket | int
# Waits until one of these can be read and returns those that can; raises if none ever will.
Wait = Callable[[Sequence[Readable]], Sequence[object]]


class ReaderLost(Exception):
    """A reader left before the end of a transfer."""


class Hello(NamedTuple):
    """The first message that a reader gets: how to make its end of the channel."""

    kind: Kind
    device: str
    size: int
    """processes of the channel, the sender first"""
    rank: int
    port: int | None
    """of a broadcast's store"""


class Next(NamedTuple):
    """A reader is done with its bucket, and asks for the next."""


class End(NamedTuple):
    """There are no more buckets."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The message that a reader gets about a bucket.

    Args:
        index:  which of the two buffers it is in
        size:   of that buffer [bytes]
        is_new: the reader has to open the buffer first
        bucket: what it holds
    """

    index: int
    size: int
    is_new: bool
    bucket: Bucket


class Sender:
    """The end that has the weights.

    Args:
        kind:         how the bytes travel: "shm" (this machine's memory), "ipc" (CUDA IPC, on one
                      GPU), "broadcast" (gloo or NCCL).
        bucket_bytes: of each of the two buffers; they grow to the largest bucket.
        readers:      processes that read every tensor.
        device:       of the tensors; with "shm" the CPU.
    """

    def __init__(
        self,
        kind: Kind,
        bucket_bytes: int = 2**30,
        readers: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.kind: Kind = kind
        self.bucket_bytes = bucket_bytes
        self.readers = readers
        self.device = torch.device(device)
        self._door: socket.socket | None = None
        self._channel: Channel | None = None
        self._connections: list[Connection] = []
        # the buffer that is being filled
        self._index = 0
        self._is_new = False

    @property
    def incoming(self) -> Incoming:
        """The stream that the readers iterate over; a new one after a transfer that failed."""
        if self._door is None:
            self._door = socket.socket(socket.AF_UNIX)
            self._door.bind("")  # the kernel picks a name, which is in no folder
            self._door.listen(self.readers)
        return Incoming(self._door.getsockname())

    def send(self, named: Named, wait: Wait) -> None:
        """Send all of ``named``.

        Args:
            named: (name, tensor of ``device``); a tensor is copied before the next is asked for,
                and a `BucketStream` writes its buckets into the channel's memory itself
            wait:  how to wait for readers, `multiprocessing.connection.wait` at its simplest

        Raises: ReaderLost when a reader left; what ``named`` and ``wait`` raise. Call `drop` then.
        Communicates: every byte once to every reader.
        """
        if not self._connections:
            with _readers():
                self._meet(wait)
        for bucket, _ in buckets_of(named, self.bucket_bytes, self._allocate):
            self._hand_over(bucket, wait)
        with _readers():
            self._await_requests(wait)
            self._send_all(End())

    def drop(self) -> None:
        """End a transfer in its middle: the readers see their sockets close."""
        for connection in self._connections:
            connection.close()
        if self._door is not None:
            self._door.close()
        if self._channel is not None:
            self._channel.close()
        self._door = None
        self._channel = None
        self._connections = []

    def _meet(self, wait: Wait) -> None:
        assert self._door is not None, "Sender.send: no reader was given `incoming`"
        if self.kind == "broadcast":
            self._channel = Broadcast(self.device, 1 + self.readers)
        else:
            self._channel = SharedMemory() if self.kind == "shm" else CudaIpc()
        while len(self._connections) < self.readers:
            wait([self._door])
            reader, _ = self._door.accept()
            who = reader.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", who)[1] != os.getuid():
                reader.close()  # another user of this machine
                continue
            self._connections.append(Connection(reader.detach()))
            port = self._channel.port if isinstance(self._channel, Broadcast) else None
            size = 1 + self.readers
            rank = len(self._connections)
            send(self._connections[-1], Hello(self.kind, self.device.type, size, rank, port))

    def _allocate(self, size: int) -> Tensor:
        """The buffer that the readers are done with."""
        assert self._channel is not None
        self._index = 1 - self._index
        buffer = self._channel.buffers.get(self._index)
        self._is_new = buffer is None or len(buffer) < size
        if self._is_new:
            self._channel.allocate(self._index, max(size, self.bucket_bytes))
        return self._channel.buffers[self._index]

    def _hand_over(self, bucket: Bucket, wait: Wait) -> None:
        channel = self._channel
        index = self._index
        assert channel is not None
        with _readers():
            channel.flush()
            self._await_requests(wait)
            self._send_all(Handover(index, len(channel.buffers[index]), self._is_new, bucket))
            for connection in self._connections if self._is_new else ():
                channel.export(index, connection)
            channel.send(index, bucket.bytes)

    def _await_requests(self, wait: Wait) -> None:
        """Returns when all readers are done with the bucket they have."""
        missing = list(self._connections)
        while missing:
            ready = wait(missing)
            for connection in [each for each in missing if each in ready]:
                recv(connection, Next)
                missing.remove(connection)

    def _send_all(self, message: Handover | End) -> None:
        for connection in self._connections:
            send(connection, message)


@contextmanager
def _readers() -> Iterator[None]:
    """Turns the system's errors about a lost reader into `ReaderLost`."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise ReaderLost(f"Sender: lost the connection to a reader: {error}") from error


@dataclass(frozen=True)
class Incoming:
    """The tensors that a `Sender` sends, as (name, tensor); another process reads a pickled copy.

    A tensor is valid until the next one is asked for: its buffer is filled again.

    Raises: RuntimeError, during iteration, when the sender stops before the end.
    """

    address: bytes

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        reader = Reader.connected.get(self.address) or Reader(self.address)
        try:
            yield from reader.tensors()
        except BaseException:  # also if the iteration is abandoned: the sender has to know
            reader.close()
            raise


class Reader:
    """A connection to a sender, kept from one transfer to the next.

    Attributes:
        connected: by the sender's address, those of this process.
    """

    connected: ClassVar[dict[bytes, Reader]] = {}

    def __init__(self, address: bytes):
        door = socket.socket(socket.AF_UNIX)
        door.connect(address)
        self.address = address
        self.connection = Connection(door.detach())
        hello = recv(self.connection, Hello)
        if hello.port is not None:
            device = torch.device(hello.device)
            self.channel: Channel = Broadcast(device, hello.size, hello.rank, hello.port)
        else:
            self.channel = SharedMemory() if hello.kind == "shm" else CudaIpc()
        self.connected[address] = self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of one transfer."""
        count = 0
        channel = self.channel
        while True:
            channel.flush()
            try:
                send(self.connection, Next())
                handover = recv(self.connection, Handover, End)
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    f"Incoming: the trainer stopped after {count} tensors, expected all of them"
                ) from error
            if isinstance(handover, End):
                return
            index = handover.index
            bucket = handover.bucket
            if handover.is_new:
                channel.open(index, handover.size, self.connection)
            channel.recv(index, bucket.bytes)
            for slot in bucket.slots:
                yield slot.name, slot.view(channel.buffers[index])
            count += len(bucket.slots)

    def close(self) -> None:
        self.connected.pop(self.address, None)
        self.connection.close()
        self.channel.close()
