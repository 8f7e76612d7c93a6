"""Broadcast: the bytes of new weights from a sender to all engines at once, by a process group.

gloo on a CPU, NCCL between GPUs. A group is made for one publish, since engines come and go, and
breaks as a whole: when one of it dies or hangs, no engine gets more, and the trainer sends all of
them the weights again, by TCP. Of the trainer's ranks only one is in it, so it waits for no
collective of theirs, and they wait for none of it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops.on_gpu import on_gpu
from pyrl_ext.parallel.buckets import Bucket
from pyrl_ext.parallel.external_groups import gloo_group, listening, own_address, store_of
from pyrl_ext.rollout.remote.receiver import Receiver
from pyrl_ext.rollout.remote.relay import Way
from pyrl_ext.rollout.remote.wire import CHUNK, WireError, need

BROKEN = "the broadcast to all engines broke"  # names who is sent the weights again
JOIN = 20.0  # longest time until all are in the group [s]
POLL = 1e-4  # between two looks at what is under way [s]
NCCL_JOIN = f"{2 * JOIN:g}"  # until a thread ends that nobody waits for any more [s]

Lost = Callable[[], str | None]


class Broadcast:
    """One member of a group: rank 0 sends, the others are engines.

    Args:
        way: this member's
        device: of this member; NCCL needs a GPU
        lost: says which member is gone; None: none is, as far as its connection shows
        door: listening socket of the group's store, on the sender

    Raises: WireError.
    """

    _group: Any = None  # torch's stubs lack what we call of it
    _closed = False

    def __init__(
        self, way: Way, device: torch.device, lost: Lost, door: socket.socket | None = None
    ):
        self._way = way
        self._lost = lost
        self._door = door
        self._stream = None
        if way.backend == "nccl":
            need(on_gpu(device), f"a broadcast by NCCL to {device}", "an engine on a GPU")
            with _as_wire_error():
                self._stream = torch.cuda.Stream(device)
                with torch.cuda.stream(self._stream):  # of another's memory more may be under way
                    self._on_device = torch.empty(CHUNK, dtype=torch.uint8, device=device)

    @property
    def joined(self) -> bool:
        """True if it is in the group."""
        return self._group is not None

    def join(self) -> None:
        """Wait until all are in the group. Raises: WireError if they are not in time."""
        ended = threading.Event()
        errors = list[Exception]()

        def run() -> None:
            door = self._door
            self._door = None
            try:
                self._group = _group(self._way, door)
                self._pass(torch.zeros(1, dtype=torch.uint8))  # NCCL connects at its first use
            except Exception as error:
                errors.append(error)
            ended.set()
            if self._closed:  # it took too long
                self.close()

        # in a thread: NCCL's own wait for a member that died takes long
        threading.Thread(target=run, name="broadcast", daemon=True).start()
        limit = min(JOIN, self._way.silence) * (2 if self._way.rank else 1)  # the sender decides
        end = time.monotonic() + limit
        while not ended.wait(POLL):
            if (why := self._lost()) or time.monotonic() > end:
                self.close()
                raise WireError(f"weights: {BROKEN} ({why or f'not all joined in {limit:g} s'})")
        if errors:
            self.close()
            raise WireError(f"weights: {BROKEN} ({errors[0]})") from errors[0]

    def pass_on(self, view: memoryview) -> None:
        """A piece of at most `CHUNK` bytes: the sender's is sent, an engine's is filled.

        Raises: WireError when the group breaks. Syncs: with NCCL, the stream of the group.
        """
        try:
            with _as_wire_error():
                self._pass(torch.frombuffer(view, dtype=torch.uint8))
        except WireError:
            self.close()
            raise

    def leave(self) -> None:
        """Leave once everything is passed on; nobody waits for the others."""
        self._end("shutdown" if self._stream else "abort")

    def close(self) -> None:
        """Leave at once, which breaks the group for the others if anything is under way."""
        self._end("abort")

    def _end(self, how: str) -> None:
        self._closed = True
        held = [self._group]
        self._group = None
        door = self._door
        self._door = None
        if door is not None:
            door.close()
        if held[0] is not None:  # in a thread: its end and its destructor may wait for a member
            threading.Thread(target=_end_group, args=(held, how), daemon=True).start()

    def _pass(self, piece: Tensor) -> None:
        if self._stream is None:
            self._broadcast(piece)
            return
        with torch.cuda.stream(self._stream):
            on_device = self._on_device[: len(piece)]
            if self._way.rank == 0:
                on_device.copy_(piece)
            self._broadcast(on_device)
            if self._way.rank:
                piece.copy_(on_device)

    def _broadcast(self, piece: Tensor) -> None:
        silence = self._way.silence
        work = None
        options = dist.BroadcastOptions()
        end = time.monotonic() + silence
        options.timeout = timedelta(seconds=silence)
        try:
            need(self._group is not None, BROKEN, "all its bytes")
            work = self._group.broadcast([piece], options)
            while not work.is_completed():
                why = self._lost()
                need(why is None, f"{BROKEN} ({why})", "all its bytes")
                need(time.monotonic() < end, f"{BROKEN} (silent for {silence:g} s)", "more bytes")
                time.sleep(POLL)
            work.wait()
        finally:
            del work  # an error's traceback would keep it, and so the group


class ToAll:
    """The sender's end of a broadcast: a bucket's bytes to all engines that are there.

    Args:
        device: of the sender
        limit: longest time for all buckets [seconds]

    Attributes:
        turn: of a bucket; one is sent after the other
    """

    _member: Broadcast | None = None

    def __init__(self, device: torch.device, limit: float):
        self.turn = asyncio.Lock()
        self._device = device
        self._left = limit
        self._engines: Sequence[Receiver] = ()

    def meet(self, engines: Sequence[Receiver], silence: float) -> None:
        """These are in the group, and are shown their way.

        Args:
            silence: longest time without a byte of the group [seconds]
        """
        self._engines = engines
        hosts = [each.host for each in engines]
        host = next((each for each in hosts if not ip_address(each).is_loopback), hosts[0])
        backend = "nccl" if on_gpu(self._device) else "gloo"
        try:
            door = listening(host)
            port = door.getsockname()[1]
            secret = secrets.token_hex(32)
            size = len(engines) + 1
            way = Way(host, port, secret, "", silence, backend, 0, size)
            self._member = Broadcast(way, self._device, self._lost, door)
        except (OSError, WireError) as error:
            self._fail(f"{BROKEN} ({error})")
            return
        for rank, each in enumerate(engines, 1):  # they wait longer, so that the sender decides
            each.show(replace(way, rank=rank, silence=2 * silence))

    async def send(self, bucket: Bucket, buffer: Tensor) -> bool:
        """Send it; when the group breaks, or broke, every engine of it has failed.

        Communicates: the bucket, in pieces; the first time when all have joined.
        """
        begin = time.monotonic()
        try:
            await asyncio.to_thread(self._send, bucket, buffer, begin + self._left)
        except WireError as error:
            self._fail(f"{error}")
        self._left -= time.monotonic() - begin
        return not any(each.error for each in self._engines)

    def close(self) -> None:
        """The group ends."""
        if self._member is not None:
            self._member.leave()

    def _send(self, bucket: Bucket, buffer: Tensor, end: float) -> None:
        why = self._lost()
        member = self._member
        need(why is None and member is not None, f"{BROKEN} ({why})", "each engine there")
        assert member is not None
        if not member.joined:
            member.join()
        view = memoryview(buffer.numpy())[: bucket.bytes]
        for begin in range(0, bucket.bytes, CHUNK):
            for each in self._engines:
                each.at = bucket.name_at(begin)
            need(time.monotonic() < end, f"{BROKEN} (it took too long)", "an end")
            member.pass_on(view[begin : begin + CHUNK])

    def _fail(self, why: str) -> None:
        for each in self._engines:
            each.fail(f"missed {each.at} ({why})")

    def _lost(self) -> str | None:
        for each in self._engines:
            if each.error or each.socket is None or gone(each.socket):
                return f"{each.address}: it {each.error or 'left'}"


def gone(connection: socket.socket) -> bool:
    """True if the other end left, or this one did."""
    if connection.fileno() < 0:
        return True
    looks = select.poll()
    looks.register(connection, select.POLLRDHUP)
    return bool(looks.poll(0))


def _group(way: Way, door: socket.socket | None) -> Any:
    limit = timedelta(seconds=JOIN)
    store = store_of(way.host, way.port, way.size, limit, door)
    known = dist.PrefixStore(way.secret, store)  # pyright: ignore[reportPrivateImportUsage]
    if way.backend == "gloo":
        own = own_address(way.host, way.port)
        return gloo_group(known, way.rank, way.size, own, limit)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout, options.config.blocking = limit, 0  # or to wait for others has no end
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", NCCL_JOIN)  # read at the first use
    with _no_watchdog():
        return dist.ProcessGroupNCCL(known, way.rank, way.size, options)


def _end_group(held: list[Any], how: str) -> None:
    group = held.pop()
    with suppress(RuntimeError):
        getattr(group, how)()


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """By default torch's watchdog ends the process of a group that fails: the trainer's, when an
    engine dies. No other group is made while a publish begins."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before, os.environ[name] = os.environ.get(name), "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _as_wire_error() -> Iterator[None]:
    """Errors of gloo, NCCL and of a GPU's memory are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"weights: {BROKEN} ({error})") from error
