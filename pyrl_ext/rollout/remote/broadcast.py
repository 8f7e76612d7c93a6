"""A broadcast of the bytes of new weights from one sender to all remote engines.

gloo on a CPU, NCCL between GPUs. A process group is made for one weight sync, since engines come
and go, and breaks as a whole: if a member dies or hangs, no engine gets more, and the trainer sends
all of them the weights again, by TCP. Only one of the trainer's ranks is in the group, so it waits
for no collective of the other ranks, and they wait for none of the group.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.external_groups import gloo_group, own_address, store_of
from pyrl_ext.rollout.remote.weight_protocol import CHUNK, BroadcastRoute, TransferError, require

BROKEN = "the broadcast to all engines broke"  # in the reason of engines that get them again
JOIN_TIMEOUT_S = 20.0  # until all members are in the group
POLL_S = 1e-4  # between two looks at an operation
NCCL_JOIN = f"{2 * JOIN_TIMEOUT_S:g}"  # until an abandoned thread ends [s]

LostMember = Callable[[], str | None]


class Broadcast:
    """One member of a process group: rank 0 sends, the others are engines.

    Args:
        route: of this member
        device: of this member; NCCL needs a GPU
        lost: names a member whose connection closed; None: no connection did
        door: listening socket of the group's store, on the sender

    Raises: TransferError.
    """

    _group: Any = None  # torch's stubs lack its methods
    _closed = False

    def __init__(
        self,
        route: BroadcastRoute,
        device: torch.device,
        lost: LostMember,
        door: socket.socket | None = None,
    ):
        self._route = route
        self._lost = lost
        self._door = door
        self._stream: torch.cuda.Stream | None = None
        if route.backend == "nccl":
            require(on_gpu(device), f"a broadcast by NCCL to {device}", "an engine on a GPU")
            with _as_transfer_error():
                self._stream = torch.cuda.Stream(device)
                with torch.cuda.stream(self._stream):  # other streams may still use their memory
                    self._on_device = torch.empty(CHUNK, dtype=torch.uint8, device=device)

    @property
    def joined(self) -> bool:
        """True if it is in the group."""
        return self._group is not None

    def join(self) -> None:
        """Wait until all are in the group. Raises: TransferError if they are not in time."""
        ended = threading.Event()
        errors = list[Exception]()

        def run() -> None:
            door = self._door
            self._door = None
            try:
                self._group = _group(self._route, door)
                self._pass(torch.zeros(1, dtype=torch.uint8))  # NCCL connects at its first use
            except Exception as error:
                errors.append(error)
            ended.set()
            if self._closed:  # it took too long
                self.close()

        # in a thread: NCCL's own wait for a member that died takes long
        threading.Thread(target=run, name="broadcast", daemon=True).start()
        limit = min(JOIN_TIMEOUT_S, self._route.silence)
        if self._route.rank:  # the sender decides
            limit *= 2
        end = time.monotonic() + limit
        while not ended.wait(POLL_S):
            reason = self._lost()
            if reason or time.monotonic() > end:
                self.close()
                reason = reason or f"not all joined in {limit:g} s"
                raise TransferError(f"weights: {BROKEN} ({reason})")
        if errors:
            self.close()
            raise TransferError(f"weights: {BROKEN} ({errors[0]})") from errors[0]

    def transfer(self, view: memoryview) -> None:
        """A piece of at most `CHUNK` bytes: the sender's is sent, an engine's is filled.

        Raises: TransferError when the group breaks. Syncs: with NCCL, the stream of the group.
        """
        try:
            with _as_transfer_error():
                self._pass(torch.frombuffer(view, dtype=torch.uint8))
        except TransferError:
            self.close()
            raise

    def leave(self) -> None:
        """Leave after the last piece, without a wait for the other members."""
        self._end("shutdown" if self._stream else "abort")

    def close(self) -> None:
        """Leave at once, which breaks the group for the others if an operation runs."""
        self._end("abort")

    def _end(self, method: str) -> None:
        self._closed = True
        groups = [self._group]
        self._group = None
        door = self._door
        self._door = None
        if door is not None:
            door.close()
        if groups[0] is not None:  # in a thread: its end and its destructor may wait for a member
            threading.Thread(target=_end_group, args=(groups, method), daemon=True).start()

    def _pass(self, piece: Tensor) -> None:
        if self._stream is None:
            self._broadcast(piece)
            return
        with torch.cuda.stream(self._stream):
            on_device = self._on_device[: len(piece)]
            if self._route.rank == 0:
                on_device.copy_(piece)
            self._broadcast(on_device)
            if self._route.rank:
                piece.copy_(on_device)

    def _broadcast(self, piece: Tensor) -> None:
        silence = self._route.silence
        options = dist.BroadcastOptions()
        options.timeout = timedelta(seconds=silence)
        end = time.monotonic() + silence
        work = None
        try:
            require(self._group is not None, BROKEN, "all its bytes")
            work = self._group.broadcast([piece], options)
            while not work.is_completed():
                reason = self._lost()
                require(reason is None, f"{BROKEN} ({reason})", "all its bytes")
                in_time = time.monotonic() < end
                require(in_time, f"{BROKEN} (silent for {silence:g} s)", "more bytes")
                time.sleep(POLL_S)
            work.wait()
        finally:
            del work  # an error's traceback would keep it, and so the group


def gone(connection: socket.socket) -> bool:
    """True if one of the two ends left."""
    if connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _group(route: BroadcastRoute, door: socket.socket | None) -> Any:
    limit = timedelta(seconds=JOIN_TIMEOUT_S)
    shared = store_of(route.host, route.port, route.size, limit, door)
    store = dist.PrefixStore(route.prefix, shared)  # pyright: ignore[reportPrivateImportUsage]
    if route.backend == "gloo":
        address = own_address(route.host, route.port)
        return gloo_group(store, route.rank, route.size, address, limit)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    options.config.blocking = 0  # a blocking wait for others has no end
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", NCCL_JOIN)  # read at the first use
    with _no_watchdog():
        return dist.ProcessGroupNCCL(store, route.rank, route.size, options)


def _end_group(groups: list[Any], method: str) -> None:
    group = groups.pop()
    with suppress(RuntimeError):
        getattr(group, method)()


@contextmanager
def _no_watchdog() -> Generator[None]:
    """By default torch's watchdog ends the process of a group that fails: the trainer's, when an
    engine dies. No other group is made while a weight sync begins."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _as_transfer_error() -> Generator[None]:
    """Errors of gloo, NCCL and of a GPU's memory are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"weights: {BROKEN} ({error})") from error
