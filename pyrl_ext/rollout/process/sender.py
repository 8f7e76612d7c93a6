"""Weights to an engine in another process: a sender and its readers, with two buffers in turn.

The sender fills one buffer while the readers empty the other. A reader requests each bucket over a
socket; requesting the next one acknowledges the previous one. The answer is the bucket (names,
types, shapes, places), and its bytes come through shared memory, CUDA IPC or a broadcast. A socket
that closes ends the transfer on both sides. If the engine consists of several processes, each of
them reads everything.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.buckets import Bucket, Named, buckets_of
from pyrl_ext.parallel.external_groups import gloo_group, listening, store_of
from pyrl_ext.parallel.shared_memory import SharedBlock, map_file

Kind = Literal["shm", "ipc", "broadcast"]
LOOPBACK = "127.0.0.1"
BROADCAST_TIMEOUT = timedelta(minutes=10)

Readable = Connection | socket.socket | int
# Waits until one of these can be read and returns those that can; raises if none ever will.
Wait = Callable[[Sequence[Readable]], Sequence[object]]


def send(connection: Connection, message: object) -> None:
    """Send one object. Not `Connection.send`, because torch changes how that pickles."""
    connection.send_bytes(pickle.dumps(message))


def recv[T](connection: Connection, *kinds: type[T]) -> T:
    """Receive one object of these kinds. Raises: EOFError or OSError when the other end is gone."""
    message = pickle.loads(connection.recv_bytes())
    assert isinstance(message, kinds), f"{type(message).__name__}, expected one of {kinds}"
    return message


def user_of(connected: socket.socket) -> int:
    """Number of the user whose process is at the other end of a Unix socket."""
    who = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", who)[1]


class ReaderLost(Exception):
    """A reader left before the end of a transfer."""


class Hello(NamedTuple):
    """The first message that a reader gets, as JSON; both ends have checked each other's user.

    Args:
        port: of a broadcast's store
        rank, size: of the reader in the broadcast, and of the broadcast
    """

    kind: Kind
    device: str
    port: int
    rank: int
    size: int


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


class LocalBroadcast:
    """A process group of one sender and its readers: gloo on a CPU, NCCL between GPUs.

    It is separate from torch's default group, which sender and readers may each have.
    """

    def __init__(self, device: torch.device, size: int, rank: int = 0, port: int = 0) -> None:
        self.device = device
        self.size = size
        self.rank = rank
        door = listening(LOOPBACK) if rank == 0 else None
        port = door.getsockname()[1] if door else port
        self._store = store_of(LOOPBACK, port, size, BROADCAST_TIMEOUT, door)
        self.port: int = self._store.port
        self._group: Any = None  # torch's stubs lack its methods

    def start(self, buffer: Tensor) -> dist.Work:
        """Begin to transfer a buffer from the sender. Waits at its first use until all joined."""
        if self._group is None:
            member = (self._store, self.rank, self.size)
            if on_gpu(self.device):
                self._group = dist.ProcessGroupNCCL(*member, dist.ProcessGroupNCCL.Options())
            else:
                self._group = gloo_group(*member, LOOPBACK, BROADCAST_TIMEOUT)
        return self._group.broadcast(buffer, 0)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()


class Sender:
    """The end that has the weights.

    Args:
        kind:         how the bytes travel: "shm" (this machine's memory), "ipc" (CUDA IPC, on one
                      GPU), "broadcast" (gloo or NCCL).
        bucket_bytes: of each of the two buffers; they grow to the largest bucket.
        readers:      processes that read every tensor.
        device:       of the tensors; with "shm" the CPU.

    Attributes:
        buffers: uint8 memory of both.
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
        self._reset()

    def _reset(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._blocks: dict[int, SharedBlock] = {}
        self._broadcast: LocalBroadcast | None = None
        self._sending: dist.Work | None = None
        self._door: socket.socket | None = None
        self._connections: list[Connection] = []
        # the buffer that is being filled
        self._index = 0
        self._is_new = False

    @property
    def incoming(self) -> IncomingWeights:
        """The stream that the readers iterate over; a new one after a transfer that failed."""
        if self._door is None:
            self._door = socket.socket(socket.AF_UNIX)
            self._door.bind("")  # the kernel picks a name, which is in no folder
            self._door.listen(self.readers)
        return IncomingWeights(self._door.getsockname())

    def send(self, named: Named, wait: Wait) -> None:
        """Send all of ``named``.

        Args:
            named: (name, tensor of ``device``); a tensor is copied before the next is asked for,
                and a `BucketStream` writes its buckets into the shared memory itself
            wait:  how to wait for readers, `multiprocessing.connection.wait` at its simplest

        Raises: ReaderLost when a reader left; what ``named`` and ``wait`` raise. Call `drop` then.
        Communicates: every byte once to every reader. Syncs: with "ipc", once a bucket.
        """
        if not self._connections:
            with _lost_readers():
                self._meet(wait)
        for bucket, _ in buckets_of(named, self.bucket_bytes, self._allocate):
            with _lost_readers():
                self._hand_over(bucket, wait)
        with _lost_readers():
            self._await_requests(wait)
            self._send_all(End())

    def drop(self) -> None:
        """End a transfer in its middle: the readers see their sockets close."""
        for connection in self._connections:
            connection.close()
        if self._door is not None:
            self._door.close()
        if self._broadcast is not None:
            self._broadcast.close()
        for block in self._blocks.values():
            block.close()
        self._reset()

    def _meet(self, wait: Wait) -> None:
        assert self._door is not None, "Sender.send: no reader was given `incoming`"
        size = 1 + self.readers
        if self.kind == "broadcast":
            self._broadcast = LocalBroadcast(self.device, size)
        while len(self._connections) < self.readers:
            wait([self._door])
            reader, _ = self._door.accept()
            if user_of(reader) != os.getuid():
                reader.close()  # another user of this machine
                continue
            self._connections.append(Connection(reader.detach()))
            port = 0 if self._broadcast is None else self._broadcast.port
            rank = len(self._connections)
            hello = Hello(self.kind, self.device.type, port, rank, size)
            self._connections[-1].send_bytes(json.dumps(hello).encode())

    def _allocate(self, size: int) -> Tensor:
        """The buffer that the readers are done with."""
        index = self._index = 1 - self._index
        self._is_new = len(self.buffers[index]) < size
        if self._is_new:
            size = max(size, self.bucket_bytes)
            if self.kind == "shm":
                if index in self._blocks:
                    self._blocks.pop(index).close()
                self._blocks[index] = SharedBlock(size)
                self.buffers[index] = self._blocks[index].memory
            else:
                self.buffers[index] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.buffers[index]

    def _hand_over(self, bucket: Bucket, wait: Wait) -> None:
        index = self._index
        buffer = self.buffers[index]
        if self._sending is not None:
            try:
                self._sending.wait()
            except RuntimeError as error:  # gloo's kind of error for a lost connection
                raise ConnectionError(str(error)) from error
        if self.kind == "ipc":  # the two processes have no stream in common
            torch.cuda.synchronize()
        self._await_requests(wait)
        self._send_all(Handover(index, len(buffer), self._is_new, bucket))
        for connection in self._connections if self._is_new else ():
            if self.kind == "shm":
                send_handle(connection, self._blocks[index].file, None)
            elif self.kind == "ipc":
                send(connection, buffer.untyped_storage()._share_cuda_())  # pyright: ignore[reportPrivateUsage]
        if self._broadcast is not None:
            self._sending = self._broadcast.start(buffer[: bucket.bytes])

    def _await_requests(self, wait: Wait) -> None:
        """Returns when all readers are done with the bucket they have."""
        missing = list(self._connections)
        while missing:
            ready = wait(missing)
            for connection in [reader for reader in missing if reader in ready]:
                recv(connection, Next)
                missing.remove(connection)

    def _send_all(self, message: Handover | End) -> None:
        for connection in self._connections:
            send(connection, message)


@contextmanager
def _lost_readers() -> Generator[None]:
    """Turns the errors about a lost reader into `ReaderLost`."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise ReaderLost(f"Sender: lost the connection to a reader: {error}") from error


@dataclass(frozen=True)
class IncomingWeights:
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
        if (user := user_of(door)) != os.getuid():  # it took the name of a sender that ended
            door.close()
            raise RuntimeError(
                f"Incoming: the sender of weights belongs to user {user}, expected {os.getuid()}, "
                "who runs this engine; nothing was read"
            )
        self.address = address
        self.connection = Connection(door.detach())
        self._hello = Hello(*json.loads(self.connection.recv_bytes()))
        self._buffers: dict[int, Tensor] = {}
        self._broadcast: LocalBroadcast | None = None
        if self._hello.kind == "broadcast":
            _, device, port, rank, size = self._hello
            self._broadcast = LocalBroadcast(torch.device(device), size, rank, port)
        self.connected[address] = self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of one transfer."""
        count = 0
        while True:
            if self._hello.kind == "ipc":
                torch.cuda.synchronize()
            try:
                send(self.connection, Next())
                handover = recv(self.connection, Handover, End)
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    f"Incoming: the trainer stopped after {count} tensors, expected all of them"
                ) from error
            if isinstance(handover, End):
                return
            bucket = handover.bucket
            if handover.is_new:
                self._buffers[handover.index] = self._open(handover.size)
            buffer = self._buffers[handover.index]
            if self._broadcast is not None:
                self._broadcast.start(buffer[: bucket.bytes]).wait()
            for slot in bucket.slots:
                yield slot.name, slot.view(buffer)
            count += len(bucket.slots)

    def _open(self, size: int) -> Tensor:
        """The buffer that the sender exports."""
        if self._hello.kind == "shm":
            file = recv_handle(self.connection)
            memory = map_file(file, size)
            os.close(file)  # the mapping keeps the memory
            return memory
        if self._hello.kind == "broadcast":
            return torch.empty(size, dtype=torch.uint8, device=self._hello.device)
        torch.cuda.init()
        # its GPU number is the sender's; here is one GPU
        _, *handle = recv(self.connection, tuple)
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle)  # pyright: ignore[reportPrivateUsage]
        empty = torch.empty(0, dtype=torch.uint8, device="cuda")
        return empty.set_(storage, 0, (size,), (1,))  # type: ignore[arg-type]

    def close(self) -> None:
        self.connected.pop(self.address, None)
        self.connection.close()
        if self._broadcast is not None:
            self._broadcast.close()
