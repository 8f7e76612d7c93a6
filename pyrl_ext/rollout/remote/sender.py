"""Transfer: a rank's end of a publish: one stream of its buckets to all engines at once.

Every engine gets all frames; the bytes of their tensors go to each of them, to one, which passes
them on to the next (`relay`), or to all at once (`broadcast`).

The caller's thread gathers tensors into one buffer while the event loop, which runs in another
thread, writes the other buffer to every engine. A buffer is free when each engine has taken it or
has failed. An engine's time counts only while it takes bytes, so a slow one delays the others by at
most its limit, and uses up none of theirs.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from pyrl_ext.parallel.buckets import Bucket, Named, buckets_of, read_to_the_end
from pyrl_ext.parallel.external_groups import family_of, own_address
from pyrl_ext.rollout.remote import wire
from pyrl_ext.rollout.remote.broadcast import ToAll
from pyrl_ext.rollout.remote.receiver import Receiver
from pyrl_ext.rollout.remote.relay import HELLO, MEET, Way, answer_to, numbers_of

Place = tuple[str, int, str]  # host and port that wait for an engine, and its secret
PATIENCE = 0.25  # share of the limit in which an engine that passes bytes on has to take some


class Transfer:
    """Sends a rank's part of one version of the weights.

    Args:
        loop: runs in another thread than the caller's
        engines: address of each
        version: of the weights
        wanted: name -> shape of every tensor that this rank has to send, others are not sent; none:
            engines do not meet it
        limit: longest time that one engine may take for the bytes [seconds]
        bucket_bytes: of each of the two buffers; they grow to the largest bucket
        device: of the tensors; from a GPU they pass through one more buffer there
        relay: number of the engine that gets the bytes, which the others pass on one to the next;
            None: each gets them from here
        broadcast: all get them at once

    Attributes:
        sent_bytes: to all engines together
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engines: Sequence[str],
        version: int,
        wanted: Mapping[str, Sequence[int]],
        limit: float,
        *,
        bucket_bytes: int = 2**30,
        device: torch.device | str = "cpu",
        relay: int | None = None,
        broadcast: bool = False,
    ):
        self.loop = loop
        self.version = version
        self.limit = limit
        self.bucket_bytes = bucket_bytes
        self.device = torch.device(device)
        self.wanted = {name: tuple(shape) for name, shape in wanted.items()}
        self._engines = [Receiver(address, limit) for address in engines]
        self._relay = None if len(engines) < 2 else relay
        self._to_all = ToAll(self.device, limit) if broadcast else None
        alone = self._relay is None and not broadcast
        self._patience = limit if alone else PATIENCE * limit
        self.sent_bytes = 0
        self._sent = dict[str, tuple[int, ...]]()
        self._doors: dict[str, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._sending: list[list[Future[None]]] = [[], []]
        self._number = 0

    async def open(self) -> list[Place]:
        """Listen for the engines; called in the loop's thread.

        Returns: where each engine meets this rank; nothing if it has nothing to send.
        Raises: WireError, OSError.
        """
        for each in self._engines if self.wanted else ():
            each.host = await asyncio.to_thread(address_towards, each.address)
            if each.host in self._doors:
                continue
            door = self._doors[each.host] = socket.socket(family_of(each.host))
            door.setblocking(False)
            door.bind((each.host, 0))
            door.listen(len(self._engines))
            self._spawn(self._accept(door))
        if self._doors:
            self._spawn(self._show_ways())
        ports = {host: door.getsockname()[1] for host, door in self._doors.items()}
        return [(each.host, ports[each.host], each.secret) for each in self._engines if ports]

    @property
    def failed(self) -> dict[str, str]:
        """Engine -> why it does not get the weights."""
        return {each.address: each.error for each in self._engines if each.error}

    def fail(self, number: int, reason: str) -> None:
        """Engine ``number`` gets no more bytes; called in the loop's thread."""
        self._engines[number].fail(reason)

    def send(self, named: Named) -> None:
        """Send all tensors to every engine that has not failed; called in the caller's thread.

        Raises: what ``named`` raises; RuntimeError when it is not what the engines hold. Then no
            engine has the weights.
        Communicates: every byte once to each engine. Syncs: a bucket, for its digest and the copy.
        """
        buckets = buckets_of(named, self.bucket_bytes, self._allocate)
        with read_to_the_end(buckets):
            try:
                for bucket, buffer in buckets:
                    if (mine := bucket.of_names(self.wanted, buffer)).slots:
                        self._give(mine, buffer)
                self._check()
                self._free(0)
                self._free(1)
                if self.wanted:
                    end = wire.end_frame(self._number, self.version, self._sent)
                    self._sending[0] = self._start(end, None)
            except BaseException:
                self.loop.call_soon_threadsafe(self._fail_all)
                raise
            finally:
                for sending in self._sending:
                    wait(sending)

    def _check(self) -> None:
        wrong = [n for n, shape in self.wanted.items() if self._sent.get(n) != shape]
        if wrong:
            raise RuntimeError(
                f"publish: {len(wrong)} of {len(self.wanted)} tensors of the engines were not sent "
                f"in their shape, {wrong[:4]}, expected all of them"
            )

    def _fail_all(self) -> None:
        for each in self._engines:
            each.fail("the trainer could not gather its weights")

    async def close(self) -> None:
        """End what still runs; called in the loop's thread."""
        for task in self._tasks:
            task.cancel()
        if self._to_all is not None:
            self._to_all.close()
        for each in self._engines:
            if each.socket is not None:
                each.socket.close()
        for door in self._doors.values():
            door.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # the caller's thread -------------------------------------------------------------------------

    def _allocate(self, size: int) -> Tensor:
        """Memory for the next bucket."""
        self._free(0)
        if self.device.type != "cpu":
            if self._on_device.numel() < size:
                self._on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
            return self._on_device
        return self._host(size)

    def _free(self, index: int) -> None:
        """Waits until every engine has taken what lies in a buffer."""
        wait(self._sending[index])
        self._sending[index] = []

    def _host(self, size: int) -> Tensor:
        if self._buffers[0].numel() < size:
            pinned = self.device.type != "cpu"
            self._buffers[0] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[0]

    def _give(self, bucket: Bucket, buffer: Tensor) -> None:
        frame = wire.bucket_frame(self._number, bucket, buffer)
        if buffer.device.type != "cpu":
            host = self._host(buffer.numel())
            buffer = host[: bucket.bytes].copy_(buffer[: bucket.bytes])
        self._sent |= {slot.name: slot.shape for slot in bucket.slots}
        self._number += 1
        sending = self._start(frame, (bucket, buffer))
        self._buffers.reverse()  # the next bucket goes into the other one
        self._sending = [self._sending[1], sending]

    def _start(self, frame: bytes, bucket: tuple[Bucket, Tensor] | None) -> list[Future[None]]:
        if self._to_all is not None:
            sends = [self._send_to_all(self._to_all, frame, bucket)]
        else:
            sends = [self._send(each, frame, bucket) for each in self._engines]
        return [asyncio.run_coroutine_threadsafe(each, self.loop) for each in sends]

    # the loop's thread ---------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, door: socket.socket) -> None:
        try:
            while True:
                connection, _ = await self.loop.sock_accept(door)
                self._spawn(self._meet(connection))
        except OSError as error:  # such as too many open files
            for each in self._engines:
                if each.socket is None:
                    each.fail(f"could not connect: the trainer's accept failed ({error})")

    async def _meet(self, connection: socket.socket) -> None:
        """Lets in who proves that it knows the secret of an engine."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each: Receiver | None = None
        try:
            async with asyncio.timeout(MEET):
                ours = secrets.token_bytes(wire.PROOF)
                await self.loop.sock_sendall(connection, wire.MAGIC + ours)
                hello = await self._recv(connection, HELLO)
                number, port = numbers_of(hello)
                if number >= len(self._engines):
                    return
                asked = self._engines[number]
                answer = answer_to(hello, asked.secret, ours)
                if asked.socket or asked.error or answer is None:
                    return
                each = asked
                asked.socket = connection
                each.relay = connection.getpeername()[0], port
                await self.loop.sock_sendall(connection, answer)
                each.met.set()
        except (OSError, EOFError) as error:  # also of time
            if each is not None:
                each.fail(f"left before the first tensor ({error})")
        finally:
            if each is None:
                connection.close()

    async def _show_ways(self) -> None:
        """Tell every engine how the bytes come to it, once it is there, or all are."""
        if self._relay is None and self._to_all is None:
            await asyncio.gather(*(self._met(each, Way()) for each in self._engines))
            return
        begin = self._relay or 0
        order = self._engines[begin:] + self._engines[:begin]
        await asyncio.gather(*map(self._met, order))
        there = [each for each in order if not each.error]
        if self._to_all is not None and there:
            self._to_all.meet(there, self._patience)
            return
        secret = ""
        before = ("", 0)
        for each in there:
            after = "" if each is there[-1] else secrets.token_hex(32)
            each.show(Way(*before, secret, after, self._patience))
            secret = after
            before = each.relay

    async def _met(self, each: Receiver, way: Way | None = None) -> None:
        try:
            await asyncio.wait_for(each.met.wait(), self._patience)
        except TimeoutError:
            each.fail(f"did not connect within {self._patience:g} s")
        else:
            if way is not None:
                each.show(way)

    async def _recv(self, connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await self.loop.sock_recv(connection, size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    async def _send(
        self, each: Receiver, frame: bytes, bucket: tuple[Bucket, Tensor] | None
    ) -> None:
        """One frame to one engine; what goes wrong is the engine's failure, not an error here."""
        async with each.turn:
            await each.ready.wait()
            if each.error or each.socket is None:
                return
            begin = time.monotonic()
            frames = each.first + frame
            each.first = b""
            try:
                async with asyncio.timeout(min(each.left, self._patience)):
                    await self.loop.sock_sendall(each.socket, frames)
                    self.sent_bytes += len(frames)
                    if bucket is not None and each.direct:
                        await self._send_tensors(each, *bucket)
                        self.sent_bytes += bucket[0].bytes
            except TimeoutError:
                each.fail(f"took no bytes of {each.at} within its {self._patience:g} s")
            except (OSError, ValueError) as error:  # a socket that was closed has no number
                each.fail(f"closed its connection at {each.at} ({error})")
            each.left -= time.monotonic() - begin

    async def _send_to_all(
        self,
        to_all: ToAll,
        frame: bytes,
        bucket: tuple[Bucket, Tensor] | None,
    ) -> None:
        """A frame to each engine, and its tensors to all of them at once."""
        async with to_all.turn:
            await asyncio.gather(*(self._send(each, frame, bucket) for each in self._engines))
            if bucket is not None and await to_all.send(*bucket):
                self.sent_bytes += bucket[0].bytes

    async def _send_tensors(self, each: Receiver, bucket: Bucket, buffer: Tensor) -> None:
        assert each.socket is not None
        view = memoryview(buffer.numpy())[: bucket.bytes]
        for begin in range(0, bucket.bytes, wire.CHUNK):
            each.at = bucket.name_at(begin)
            await self.loop.sock_sendall(each.socket, view[begin : begin + wire.CHUNK])


def address_towards(address: str) -> str:
    """This host's address on the way to a server's; no packet is sent."""
    server = urlsplit(address)
    with suppress(OSError):
        return own_address(server.hostname, server.port)
    raise wire.WireError(f"publish: no way to {address}, expected a host that can be reached")
