"""How a bucket's bytes reach another process: by shared memory, CUDA IPC or broadcast."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops.on_gpu import on_gpu
from pyrl_ext.parallel.external_groups import gloo_group, listening, store_of
from pyrl_ext.parallel.shared_memory import SharedBlock, map_file

Kind = Literal["shm", "ipc", "broadcast"]

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(minutes=10)  # time limit of a broadcast


def send(connection: Connection, message: object) -> None:
    """Send one object. Not `Connection.send`, because torch changes how that pickles."""
    connection.send_bytes(pickle.dumps(message))


def recv[T](connection: Connection, *kinds: type[T]) -> T:
    """Receive one object of these kinds. Raises: EOFError or OSError when the other end is gone."""
    message = pickle.loads(connection.recv_bytes())
    assert isinstance(message, kinds), f"{type(message).__name__}, expected one of {kinds}"
    return message


class Channel:
    """One end of a pair of buffers that a sender shares with its readers.

    Optional steps default to no-ops.

    Attributes:
        buffers: 0 or 1 -> uint8 memory.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, Tensor] = {}

    def allocate(self, index: int, size: int) -> None:
        """Sender: make a buffer of ``size`` bytes, in place of one that was too small."""
        raise NotImplementedError

    def export(self, index: int, reader: Connection) -> None:
        """Sender: let ``reader`` open a buffer that was allocated."""

    def open(self, index: int, size: int, sender: Connection) -> None:
        """Reader: open the buffer that the sender exports."""
        raise NotImplementedError

    def flush(self) -> None:
        """Both: finish what still writes to or reads from a buffer; then the other end is told."""

    def send(self, index: int, used: int) -> None:
        """Sender: start to transfer the first ``used`` bytes; the readers receive them now."""

    def recv(self, index: int, used: int) -> None:
        """Reader: wait for what `send` transfers."""

    def close(self) -> None:
        self.buffers.clear()


class SharedMemory(Channel):
    """Memory that both processes map."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, SharedBlock] = {}

    def allocate(self, index: int, size: int) -> None:
        if index in self._blocks:
            self._blocks.pop(index).close()
        self._blocks[index] = SharedBlock(size)
        self.buffers[index] = self._blocks[index].memory

    def export(self, index: int, reader: Connection) -> None:
        send_handle(reader, self._blocks[index].file, None)

    def open(self, index: int, size: int, sender: Connection) -> None:
        file = recv_handle(sender)
        self.buffers[index] = map_file(file, size)
        os.close(file)  # the mapping keeps the memory

    def close(self) -> None:
        super().close()
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()


class CudaIpc(Channel):
    """Memory of the GPU that both processes use."""

    def allocate(self, index: int, size: int) -> None:
        self.buffers[index] = torch.empty(size, dtype=torch.uint8, device="cuda")

    def export(self, index: int, reader: Connection) -> None:
        send(reader, self.buffers[index].untyped_storage()._share_cuda_())

    def open(self, index: int, size: int, sender: Connection) -> None:
        torch.cuda.init()
        _, *handle = recv(sender, tuple)  # its GPU number is the sender's; here is one GPU
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle)
        empty = torch.empty(0, dtype=torch.uint8, device="cuda")
        self.buffers[index] = empty.set_(storage, 0, (size,), (1,))  # type: ignore[arg-type]

    def flush(self) -> None:
        """Syncs: the two processes have no stream in common."""
        torch.cuda.synchronize()


class Broadcast(Channel):
    """A process group of one sender and its readers: gloo on a CPU, NCCL between GPUs.

    It is separate from torch's default group, which sender and readers may each have.
    """

    def __init__(self, device: torch.device, size: int, rank: int = 0, port: int = 0) -> None:
        super().__init__()
        self.device = device
        self.size = size
        self.rank = rank
        door = listening(LOOPBACK) if rank == 0 else None
        port = door.getsockname()[1] if door else port
        self._store = store_of(LOOPBACK, port, size, PATIENCE, door)
        self.port = self._store.port
        self._joined: Any = None  # torch's stubs lack what we call of its process groups
        self._sending: dist.Work | None = None

    def allocate(self, index: int, size: int) -> None:
        self.buffers[index] = torch.empty(size, dtype=torch.uint8, device=self.device)

    def open(self, index: int, size: int, sender: Connection) -> None:
        self.allocate(index, size)

    def flush(self) -> None:
        try:
            if self._sending is not None:
                self._sending.wait()
        except RuntimeError as error:  # gloo's kind of error for a lost connection
            raise ConnectionError(str(error)) from error

    def send(self, index: int, used: int) -> None:
        self._sending = self._group.broadcast(self.buffers[index][:used], 0)

    def recv(self, index: int, used: int) -> None:
        self._group.broadcast(self.buffers[index][:used], 0).wait()

    @property
    def _group(self) -> Any:
        """Joined at the first use, by all of its processes at once."""
        if self._joined is None:
            where = (self._store, self.rank, self.size)
            if on_gpu(self.device):
                self._joined = dist.ProcessGroupNCCL(*where, dist.ProcessGroupNCCL.Options())
            else:
                self._joined = gloo_group(*where, LOOPBACK, PATIENCE)
        return self._joined

    def close(self) -> None:
        super().close()
        if self._joined is not None:
            self._joined.abort()
