"""How weights reach an engine in another process: in buckets of bytes, two of them in turn.

The sender packs tensors into one bucket while the readers empty the other. A reader asks for each
bucket, and by that says that it is done with the one before; then comes what is in it (names,
types, shapes, places) over a socket of its own, and its bytes by shared memory, by CUDA IPC or by a
broadcast. A socket that closes ends a publish on both sides. An engine in several processes reads
it in each of them.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["shm", "ipc", "broadcast"]
# Waits until one of these can be read and returns those that can; raises where that is in vain.
Wait = Callable[[list[Any]], list[Any]]

ALIGNMENT = 64  # of a tensor in a bucket [bytes]
PATIENCE = timedelta(minutes=10)  # of a broadcast


class Lost(Exception):
    """A reader left before the end of a publish."""


class Packed(NamedTuple):
    """Where a tensor lies in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Bucket(NamedTuple):
    """What a reader is told of a bucket: which of the two, whether it must be opened, its bytes."""

    slot: int
    size: int
    is_new: bool
    used: int
    tensors: list[Packed]


def tell(connection: Connection, message: Any) -> None:
    """Send one object. Not `Connection.send`, whose pickles torch changes."""
    connection.send_bytes(pickle.dumps(message))


def hear(connection: Connection) -> Any:
    """Receive one object. Raises: EOFError or OSError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())


# the ways of the bytes ----------------------------------------------------------------------------


class Way:
    """Two buckets, opened on both sides. What a way has no need for does nothing."""

    def __init__(self) -> None:
        self.buckets: dict[int, Tensor] = {}

    def make(self, slot: int, size: int) -> None:
        """The sender's bucket, in place of one that was too small."""
        raise NotImplementedError

    def give(self, slot: int, reader: Connection) -> None:
        """Let ``reader`` open a bucket that was made."""

    def take(self, slot: int, size: int, sender: Connection) -> None:
        """Open what `give` gives."""
        raise NotImplementedError

    def packed(self) -> None:
        """A bucket is full; the readers will be told."""

    def send(self, slot: int, used: int) -> None:
        """The readers were told, and receive."""

    def receive(self, slot: int, used: int) -> None:
        """Against `send`."""

    def emptied(self) -> None:
        """A bucket was read; the sender will be told."""

    def close(self) -> None:
        self.buckets.clear()


class SharedMemory(Way):
    """Memory without a name: it is gone with the last process that has it open."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[int, int] = {}

    def make(self, slot: int, size: int) -> None:
        if slot in self._files:
            os.close(self._files.pop(slot))
        self._files[slot] = os.memfd_create("pyrl-weights")
        os.ftruncate(self._files[slot], size)
        self.buckets[slot] = _mapped(self._files[slot], size)

    def give(self, slot: int, reader: Connection) -> None:
        send_handle(reader, self._files[slot], None)

    def take(self, slot: int, size: int, sender: Connection) -> None:
        file = recv_handle(sender)
        self.buckets[slot] = _mapped(file, size)
        os.close(file)  # the mapping keeps it

    def close(self) -> None:
        super().close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class CudaIpc(Way):
    """Memory of the GPU that both processes use."""

    def make(self, slot: int, size: int) -> None:
        self.buckets[slot] = torch.empty(size, dtype=torch.uint8, device="cuda")

    def give(self, slot: int, reader: Connection) -> None:
        tell(reader, self.buckets[slot].untyped_storage()._share_cuda_())

    def take(self, slot: int, size: int, sender: Connection) -> None:
        torch.cuda.init()
        _, *handle = hear(sender)  # the number of the GPU is the sender's; here it is the only one
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle)
        empty: Any = torch.empty(0, dtype=torch.uint8, device="cuda")
        self.buckets[slot] = empty.set_(storage, 0, (size,), (1,))

    def packed(self) -> None:
        """Syncs: what was packed is there before the other process looks."""
        torch.cuda.synchronize()

    def emptied(self) -> None:
        """Syncs: what was read is read before it is overwritten."""
        torch.cuda.synchronize()


class Broadcast(Way):
    """A process group of one sender and its readers: gloo on a CPU, NCCL between GPUs.

    It is no part of torch's default group, which the sender and the readers may each have.
    """

    def __init__(self, device: torch.device, size: int, rank: int = 0, port: int = 0) -> None:
        super().__init__()
        self.device, self.size, self.rank = device, size, rank
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", port, size, rank == 0, PATIENCE, False
        )
        self.port = self._store.port
        self._joined: Any = None
        self._sent: Any = None

    def make(self, slot: int, size: int) -> None:
        self.buckets[slot] = torch.empty(size, dtype=torch.uint8, device=self.device)

    def take(self, slot: int, size: int, sender: Connection) -> None:
        self.make(slot, size)

    def packed(self) -> None:
        try:
            if self._sent is not None:
                self._sent.wait()
        except RuntimeError as error:  # gloo says it so
            raise ConnectionError(str(error)) from error

    def send(self, slot: int, used: int) -> None:
        self._sent = self._group.broadcast(self.buckets[slot][:used], 0)

    def receive(self, slot: int, used: int) -> None:
        self._group.broadcast(self.buckets[slot][:used], 0).wait()

    @property
    def _group(self) -> Any:
        """Joined when first used: all others are about to."""
        if self._joined is None:
            where = (self._store, self.rank, self.size)
            if self.device.type == "cuda":
                self._joined = dist.ProcessGroupNCCL(*where, dist.ProcessGroupNCCL.Options())
            else:
                options: Any = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                options._timeout = PATIENCE
                self._joined = dist.ProcessGroupGloo(*where, options)
        return self._joined

    def close(self) -> None:
        super().close()
        if self._joined is not None:
            self._joined.abort()


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _view(bucket: Tensor, tensor: Packed) -> Tensor:
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    return bucket[tensor.start : tensor.start + size].view(tensor.dtype).view(tensor.shape)


@contextmanager
def _lost() -> Iterator[None]:
    """What the system says about a reader that is gone, as `Lost`."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise Lost(f"Sender: a reader is gone: {error}") from error


# the two ends -------------------------------------------------------------------------------------


class Sender:
    """The end of who has the weights.

    Args:
        kind:         the way of the bytes: "shm" (this machine's memory), "ipc" (CUDA IPC, on one
                      GPU), "broadcast" (gloo or NCCL).
        bucket_bytes: of each of the two buckets; a larger tensor gets a bucket of its own size.
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
        self.kind, self.bucket_bytes, self.readers = kind, bucket_bytes, readers
        self.device = torch.device(device)
        self._door: socket.socket | None = None
        self._way: Way | None = None
        self._connections: list[Connection] = []

    @property
    def incoming(self) -> Incoming:
        """What the readers iterate over; it is another one after a publish that failed."""
        if self._door is None:
            self._door = socket.socket(socket.AF_UNIX)
            self._door.bind("")  # the kernel finds a name, which lies in no folder
            self._door.listen(self.readers)
        return Incoming(self._door.getsockname())

    def send(self, named: Iterable[tuple[str, Tensor]], wait: Wait) -> None:
        """One publish.

        Args:
            named: (name, tensor of ``device``); a tensor is copied before the next is asked for
            wait:  how to wait for readers, `multiprocessing.connection.wait` at its simplest

        Raises: Lost when a reader left; what ``named`` and ``wait`` raise. Then `drop` is due.
        Communicates: every byte once to every reader.
        """
        if not self._connections:
            with _lost():
                self._meet(wait)
        slot, used, new, packed = 0, 0, False, []
        for name, tensor in named:
            start = -(-used // ALIGNMENT) * ALIGNMENT
            if packed and start + tensor.nbytes > self.bucket_bytes:
                self._hand_over(slot, used, new, packed, wait)
                slot, start, packed = 1 - slot, 0, []
            if not packed:
                new = self._make_room(slot, tensor.nbytes)
            assert self._way is not None
            place = Packed(name, tensor.dtype, tuple(tensor.shape), start)
            _view(self._way.buckets[slot], place).copy_(tensor.detach())
            packed.append(place)
            used = start + tensor.nbytes
        if packed:
            self._hand_over(slot, used, new, packed, wait)
        with _lost():
            self._await_requests(wait)
            self._tell_all(None)

    def drop(self) -> None:
        """End a publish in its middle: the readers see their sockets close."""
        for connection in self._connections:
            connection.close()
        if self._door is not None:
            self._door.close()
        if self._way is not None:
            self._way.close()
        self._door, self._way, self._connections = None, None, []

    def _meet(self, wait: Wait) -> None:
        assert self._door is not None, "Sender.send: nobody was given `incoming`"
        if self.kind == "broadcast":
            self._way = Broadcast(self.device, 1 + self.readers)
        else:
            self._way = SharedMemory() if self.kind == "shm" else CudaIpc()
        while len(self._connections) < self.readers:
            wait([self._door])
            reader, _ = self._door.accept()
            who = reader.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", who)[1] != os.getuid():
                reader.close()  # another user of this machine
                continue
            self._connections.append(Connection(reader.detach()))
            port = self._way.port if isinstance(self._way, Broadcast) else None
            hello = (self.kind, self.device.type, 1 + self.readers, len(self._connections), port)
            tell(self._connections[-1], hello)

    def _make_room(self, slot: int, size: int) -> bool:
        """Whether the bucket is a new one, that readers must open."""
        assert self._way is not None
        if (there := self._way.buckets.get(slot)) is not None and len(there) >= size:
            return False
        self._way.make(slot, max(size, self.bucket_bytes))
        return True

    def _hand_over(
        self, slot: int, used: int, is_new: bool, packed: list[Packed], wait: Wait
    ) -> None:
        way = self._way
        assert way is not None
        with _lost():
            way.packed()
            self._await_requests(wait)
            self._tell_all(Bucket(slot, len(way.buckets[slot]), is_new, used, packed))
            for connection in self._connections if is_new else ():
                way.give(slot, connection)
            way.send(slot, used)

    def _await_requests(self, wait: Wait) -> None:
        """All readers are done with what they were given."""
        silent = list(self._connections)
        while silent:
            for connection in wait(silent):
                hear(connection)
                silent.remove(connection)

    def _tell_all(self, message: Bucket | None) -> None:
        for connection in self._connections:
            tell(connection, message)


@dataclass(frozen=True)
class Incoming:
    """What a `Sender` sends, as (name, tensor); pickled to another process it is read there.

    A tensor is valid until the next one is asked for: its bucket is filled again.

    Raises: RuntimeError, while it is iterated over, when the sender stops before the end.
    """

    address: bytes

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        reader = _Reader.open.get(self.address) or _Reader(self.address)
        try:
            yield from reader.tensors()
        except BaseException:  # also of who stops reading: the sender is to know
            reader.close()
            raise


class _Reader:
    """A connection to a sender, kept from one publish to the next."""

    open: ClassVar[dict[bytes, _Reader]] = {}

    def __init__(self, address: bytes):
        door = socket.socket(socket.AF_UNIX)
        door.connect(address)
        self.address, self.connection = address, Connection(door.detach())
        kind, device, size, rank, port = hear(self.connection)
        if kind == "broadcast":
            self.way: Way = Broadcast(torch.device(device), size, rank, port)
        else:
            self.way = SharedMemory() if kind == "shm" else CudaIpc()
        self.open[address] = self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        count, way = 0, self.way
        while True:
            way.emptied()
            try:
                tell(self.connection, "next")
                bucket: Bucket | None = hear(self.connection)
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    f"transport: the trainer stopped after {count} tensors, expected all of them"
                ) from error
            if bucket is None:
                return
            if bucket.is_new:
                way.take(bucket.slot, bucket.size, self.connection)
            way.receive(bucket.slot, bucket.used)
            for tensor in bucket.tensors:
                yield tensor.name, _view(way.buckets[bucket.slot], tensor)
            count += len(bucket.tensors)

    def close(self) -> None:
        self.open.pop(self.address, None)
        self.connection.close()
        self.way.close()
