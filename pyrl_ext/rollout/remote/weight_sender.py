"""The trainer's end of a transfer: a rank's buckets to all remote engines at once.

Every engine gets all frames by TCP; the bytes of their tensors go to each of them by TCP too, or to
all at once by a broadcast.

The caller's thread gathers tensors into one buffer while a thread for each engine writes the other
buffer to it. A buffer is free when each engine has taken it or has failed. An engine's time counts
only while it takes bytes, so a slow one delays the others by at most its limit, and uses up none of
theirs.
"""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.buckets import Bucket, Named, buckets_of, read_to_the_end
from pyrl_ext.parallel.external_groups import listening, own_address
from pyrl_ext.rollout.remote.broadcast import BROKEN, Broadcast, gone
from pyrl_ext.rollout.remote.changes import Changes, SentBuckets
from pyrl_ext.rollout.remote.cuts import CUT_S, reached
from pyrl_ext.rollout.remote.tls import Certificate, shut
from pyrl_ext.rollout.remote.weight_protocol import (
    BROADCAST_SHARE,
    CHUNK,
    CONNECT_TIMEOUT_S,
    HELLO,
    KEY_BYTES,
    BroadcastRoute,
    SenderAddress,
    TransferError,
    bucket_digest,
    bucket_frame,
    described,
    end_frame,
    engine_of,
    name_of,
    require,
)

NO_FILE = (errno.EMFILE, errno.ENFILE)
ACCEPT_AGAIN_S = 0.1  # after which a sender without a free file accepts again


class EngineLink:
    """The sender's connection to one engine.

    Args:
        limit: longest time that the engine may take for all bytes, and to connect [s]

    Attributes:
        host: address of this host towards the engine
        key: that it has to send
        at: the tensor that it takes now
        error: why it gets no more bytes; None: it does
        sent: number of bytes
        met: it is connected, or failed
    """

    def __init__(self, address: str, limit: float):
        self.address = address
        self.limit = limit
        self.host = ""
        self.key = secrets.token_hex(KEY_BYTES)
        self.at = "the first tensor"
        self.error: str | None = None
        self.sent = 0
        self.met = threading.Event()
        self.socket: socket.socket | None = None
        self._left = limit

    def fail(self, reason: str) -> None:
        """The engine gets no more; the first reason is kept."""
        self.error = self.error or reason
        self.met.set()
        if self.socket is not None:
            with suppress(OSError):  # not closed: a write may be waiting for it
                shut(self.socket)

    def send(self, frame: bytes, bucket: Bucket | None = None, data: Tensor | None = None) -> None:
        """Send a frame, and the bytes or changes of a bucket; an error is the engine's failure."""
        if not self.met.wait(self.limit):
            self.fail(f"did not connect within {self.limit:g} s")
        if self.error or self.socket is None:
            return
        begin = time.monotonic()
        try:
            self._write(frame, begin)
            if bucket is not None and data is not None:
                view = memoryview(data.numpy())
                for start in range(0, len(view), CHUNK):
                    self.at = name_of(bucket, start, len(view))
                    self._write(view[start : start + CHUNK], begin)
        except TimeoutError:
            self.fail(f"took no bytes of {self.at} within its {self.limit:g} s")
        except OSError as error:
            self.fail(f"closed its connection at {self.at} ({error})")
        self._left -= time.monotonic() - begin

    def _write(self, data: bytes | memoryview, begin: float) -> None:
        assert self.socket is not None
        self.socket.settimeout(max(begin + self._left - time.monotonic(), 1e-3))
        self.socket.sendall(data)
        self.sent += len(data)


class Way(NamedTuple):
    """From one rank to one engine.

    Args:
        sender: where the rank waits for the engine
        route: of the bytes of tensors; None: over the connection to the sender
    """

    sender: SenderAddress
    route: BroadcastRoute | None


class Transfer:
    """Sends a rank's part of one version of the weights.

    Args:
        engines: address of each
        version: of the weights
        wanted: name -> shape of every tensor that this rank has to send, others are not sent; none:
            engines do not connect to it
        limit: longest time that one engine may take for the bytes [seconds]
        bucket_bytes: of each of the two buffers; they grow to the largest bucket
        device: of the tensors; from a GPU they pass through one more buffer there
        broadcast: all engines get the bytes at once
        sent: copies of what this rank sent before, which are replaced; None: it keeps none
        delta: all engines hold what ``sent`` holds, so changes of it are enough
        certificate: of this host; bytes to engines are encrypted, not those of a broadcast

    Attributes:
        saved_bytes: number of bytes that all engines together got before
    """

    def __init__(
        self,
        engines: Sequence[str],
        version: int,
        wanted: Mapping[str, Sequence[int]],
        limit: float,
        *,
        bucket_bytes: int = 2**30,
        device: torch.device | str = "cpu",
        broadcast: bool = False,
        sent: SentBuckets | None = None,
        delta: bool = False,
        certificate: Certificate | None = None,
    ):
        assert certificate is None or not broadcast  # a rule of the plan
        self.saved_bytes = 0
        self.version = version
        self.limit = limit
        self.bucket_bytes = bucket_bytes
        self.device = torch.device(device)
        self.wanted = {name: tuple(shape) for name, shape in wanted.items()}
        self._patience = BROADCAST_SHARE * limit if broadcast else limit
        self._links = [EngineLink(address, self._patience) for address in engines]
        self._broadcast = BroadcastSender(self._links, self.device, limit) if broadcast else None
        # a thread for each target, so that its frames stay in order
        self._writers = [ThreadPoolExecutor(1) for _ in ([0] if broadcast else engines)]
        self._doors: dict[str, socket.socket] = {}
        self._sent = dict[str, tuple[int, ...]]()
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._sending: list[list[Future[None]]] = [[], []]
        self._number = 0
        self._copies = sent
        self._delta = delta
        self._certificate = certificate

    def open(self, rank: int = 0) -> list[Way]:
        """Listen for the engines.

        Args:
            rank: of the trainer, for the addresses

        Returns: the way to each engine; nothing if this rank has nothing to send.
        Raises: TransferError, OSError.
        """
        if not self.wanted:
            return []
        for link in self._links:
            link.host = address_towards(link.address, min(self.limit, CUT_S))
            if link.host not in self._doors:
                door = listening(link.host)
                self._doors[link.host] = door
                threading.Thread(target=self._accept, args=(door,), daemon=True).start()
        routes = [None] * len(self._links)
        if self._broadcast is not None:
            routes = self._broadcast.open(self._patience)
        ways: list[Way] = []
        for link, route in zip(self._links, routes, strict=True):
            port = self._doors[link.host].getsockname()[1]
            digest = None if self._certificate is None else self._certificate.digest
            sender = SenderAddress(
                rank=rank, host=link.host, port=port, key=link.key, certificate=digest
            )
            ways.append(Way(sender, route))
        return ways

    @property
    def failed(self) -> dict[str, str]:
        """Engine -> reason why it does not get the weights."""
        return {link.address: link.error for link in self._links if link.error}

    @property
    def sent_bytes(self) -> int:
        """Number of bytes to all engines together."""
        shared = 0 if self._broadcast is None else self._broadcast.sent
        return shared + sum(link.sent for link in self._links)

    def fail(self, number: int, reason: str) -> None:
        """Engine ``number`` gets no more bytes; for any thread."""
        self._links[number].fail(reason)

    def send(self, named: Named) -> None:
        """Send all tensors to every engine that has not failed.

        Raises: what ``named`` raises; RuntimeError when it is not what the engines hold. Then no
            engine has the weights.
        Communicates: every byte once to each engine. Syncs: a bucket, for its digest and the copy.
        """
        buckets = buckets_of(named, self.bucket_bytes, self._allocate)
        with read_to_the_end(buckets):
            try:
                for bucket, buffer in buckets:
                    wanted = bucket.of_names(self.wanted, buffer)
                    if wanted.slots:
                        self._send_bucket(wanted, buffer)
                self._check()
                if self._copies is not None:
                    self._copies.end(self._number)
                if self.wanted:
                    self._start(end_frame(self._number, self.version, self._sent), None, None)
            except BaseException:
                for link in self._links:
                    link.fail("the trainer could not gather its weights")
                raise
            finally:
                self._free(0)
                self._free(1)

    def close(self) -> None:
        """End what still runs."""
        for link in self._links:
            link.fail("the transfer ended")
        for writer in self._writers:
            writer.shutdown()
        if self._broadcast is not None:
            self._broadcast.close()
        for door in self._doors.values():
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # ends a wait in accept
            door.close()
        for link in self._links:
            if link.socket is not None:
                link.socket.close()

    def _check(self) -> None:
        wrong = [name for name, shape in self.wanted.items() if self._sent.get(name) != shape]
        if wrong:
            raise RuntimeError(
                f"publish: {len(wrong)} of {len(self.wanted)} tensors of the engines were not sent "
                f"in their shape, {wrong[:4]}, expected all of them"
            )

    # buffers -------------------------------------------------------------------------------------

    def _allocate(self, size: int) -> Tensor:
        """Memory for the next bucket."""
        self._free(0)
        if self.device.type == "cpu":
            return self._host(size)
        if self._on_device.numel() < size:
            self._on_device = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._on_device

    def _free(self, index: int) -> None:
        """Wait until every engine has taken the bytes of a buffer."""
        wait(self._sending[index])
        self._sending[index] = []

    def _host(self, size: int) -> Tensor:
        if self._buffers[0].numel() < size:
            pinned = self.device.type != "cpu"
            self._buffers[0] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[0]

    def _send_bucket(self, bucket: Bucket, buffer: Tensor) -> None:
        tensors = described(bucket)
        data = buffer[: bucket.bytes]
        known = bucket_digest(tensors, data)
        if buffer.device.type != "cpu":
            data = self._host(buffer.numel())[: bucket.bytes].copy_(data)
        changes = self._changes(data, known)
        base = None if changes is None else changes.base
        data = data if changes is None else changes.data
        frame = bucket_frame(self._number, self.version, tensors, known, len(data), base)
        self._sent |= {slot.name: slot.shape for slot in bucket.slots}
        self._number += 1
        self._start(frame, bucket, data)
        self._buffers.reverse()  # the next bucket goes into the other one
        self._sending.reverse()

    def _changes(self, data: Tensor, known: str) -> Changes | None:
        """The changes to send for a bucket; None if all bytes are sent. Keeps a copy of these."""
        copies = self._copies
        if copies is None:
            return None
        changes = copies.changes(self._number, data) if self._delta else None
        copies.keep(self._number, data, known)
        if changes is not None:
            targets = 1 if self._broadcast is not None else sum(not e.error for e in self._links)
            self.saved_bytes += targets * (len(data) - len(changes.data))
        return changes

    def _start(self, frame: bytes, bucket: Bucket | None, data: Tensor | None) -> None:
        """Write a frame to every engine, in their threads."""
        sends: list[Callable[..., None]] = [link.send for link in self._links]
        if self._broadcast is not None:
            sends = [self._broadcast.send]
        self._sending[0] += [
            writer.submit(send, frame, bucket, data)
            for writer, send in zip(self._writers, sends, strict=True)
        ]

    # connections ---------------------------------------------------------------------------------

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                connection, _ = door.accept()
            except OSError as error:
                if error.errno in NO_FILE:  # strangers may hold them, which are soon closed
                    time.sleep(ACCEPT_AGAIN_S)
                    continue
                for link in self._links:
                    if link.socket is None:
                        link.fail(f"could not connect: the trainer's accept failed ({error})")
                return
            threading.Thread(target=self._meet, args=(connection,), daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        """Lets in an engine that sends its key; closes any other connection."""
        greeting = b""
        with suppress(OSError):
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._certificate is not None:
                connection = self._certificate.context.wrap_socket(connection, server_side=True)
            greeting = _received(connection, HELLO.size)
        number = None
        if len(greeting) == HELLO.size:
            number = engine_of(greeting, [link.key for link in self._links])
        link = None if number is None else self._links[number]
        if link is None or link.socket is not None or link.error:
            connection.close()
            return
        link.socket = connection
        link.met.set()


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if the other end closes the connection."""
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


class BroadcastSender:
    """The sender's end of a broadcast: a bucket's bytes to all engines at once.

    Args:
        links: to the engines; if one of them fails, all do
        device: of the sender
        limit: longest time for all buckets [seconds]

    Attributes:
        sent: number of bytes
    """

    _member: Broadcast | None = None

    def __init__(self, links: Sequence[EngineLink], device: torch.device, limit: float):
        self.sent = 0
        self._links = links
        self._device = device
        self._left = limit

    def open(self, silence: float) -> list[BroadcastRoute]:
        """The routes of the engines. Raises: TransferError, OSError.

        Args:
            silence: longest time without a byte of the group [seconds]
        """
        hosts = [link.host for link in self._links]
        host = next((name for name in hosts if not ip_address(name).is_loopback), hosts[0])
        door = listening(host)
        route = BroadcastRoute(
            host=host,
            port=door.getsockname()[1],
            prefix=secrets.token_hex(KEY_BYTES),
            backend="nccl" if on_gpu(self._device) else "gloo",
            rank=0,
            size=len(self._links) + 1,
            silence=silence,
        )
        self._member = Broadcast(route, self._device, self._lost, door)
        # engines wait longer, so that the sender decides
        return [
            route.model_copy(update={"rank": rank, "silence": 2 * silence})
            for rank in range(1, route.size)
        ]

    def send(self, frame: bytes, bucket: Bucket | None, data: Tensor | None) -> None:
        """A frame to each engine, and its bytes or changes to all of them at once; if the group
        breaks, or broke, every engine of it has failed.

        Communicates: the bucket, in pieces; the first time when all have joined.
        """
        for link in self._links:
            link.send(frame)
        if bucket is None or data is None:
            return
        begin = time.monotonic()
        try:
            self._send_data(bucket, data, begin + self._left)
        except TransferError as error:
            for link in self._links:
                link.fail(f"missed {link.at} ({error})")
        self._left -= time.monotonic() - begin

    def close(self) -> None:
        """End the group."""
        if self._member is not None:
            self._member.leave()

    def _send_data(self, bucket: Bucket, data: Tensor, end: float) -> None:
        lost = self._lost()
        member = self._member
        require(lost is None, f"{BROKEN} ({lost})", "every engine there")
        assert member is not None
        if not member.joined:
            member.join()
        view = memoryview(data.numpy())
        for begin in range(0, len(view), CHUNK):
            for link in self._links:
                link.at = name_of(bucket, begin, len(view))
            require(time.monotonic() < end, f"{BROKEN} (it took too long)", "an end")
            member.transfer(view[begin : begin + CHUNK])
        self.sent += len(view)

    def _lost(self) -> str | None:
        for link in self._links:
            if link.error or link.socket is None or gone(link.socket):
                return f"{link.address}: it {link.error or 'left'}"
        return None


def way_to(address: str) -> str:
    """`address_towards`, tried once. Raises: OSError."""
    server = urlsplit(address)
    return own_address(server.hostname, server.port)


def address_towards(address: str, patience: float) -> str:
    """This host's address on the way to a server's; no packet is sent.

    Args:
        patience: longest time without a way [seconds]
    """
    with suppress(OSError):
        return reached(lambda: way_to(address), patience)
    raise TransferError(f"publish: cannot reach {address}, expected a reachable host")
