"""The engine's end of a weight sync: receive all tensors, verify them, then load them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import torch
from pydantic_core import to_json
from torch import Tensor

from pyrl_ext.rollout.remote.broadcast import Broadcast, gone
from pyrl_ext.rollout.remote.cuts import CUT_S, reached
from pyrl_ext.rollout.remote.tls import secured, shut
from pyrl_ext.rollout.remote.weight_protocol import (
    BROADCAST_SHARE,
    CONNECT_TIMEOUT_S,
    HELLO,
    MAGIC,
    NO_BASE,
    SILENCE_SHARE,
    IncomingTensors,
    SenderAddress,
    TransferError,
    UpdateInfo,
    require,
)

NO_CONNECTION = "weights: no connection to a sender"
# TCP keepalive, which detects a lost host: idle [s], interval [s], probes
KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}


class StagedUpdate:
    """The weights of one weight sync, received while the engine keeps the old ones.

    The order is `start`, `update`, `finish`; `start` and `drop` may come at any time, and drop
    what came. Whatever fails, the engine's weights are not touched.

    Args:
        wanted: name -> shape of every tensor that the engine holds
        device: of the engine; tensors come into host memory

    Attributes:
        kept: number of the weight sync whose bytes are kept, so that the next one may send changes
            of them; "": of none
    """

    def __init__(self, wanted: Mapping[str, Sequence[int]], device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.wanted = {name: tuple(shape) for name, shape in wanted.items()}
        self._started = False
        self._lock = threading.Lock()  # an update runs in a thread
        self._number = 0  # of starts and drops
        self._received: tuple[UpdateInfo, dict[str, Tensor]] | None = None
        self.kept = ""
        self._buckets = dict[str, Tensor]()

    def start(self) -> None:
        """A weight sync begins; what an earlier one left is dropped."""
        self._forget(starts=True)

    def drop(self) -> None:
        """Forget what came, and what an update that still runs will bring."""
        self._forget()

    def forget_kept(self) -> tuple[str, dict[str, Tensor]]:
        """Free what is kept for the next sync; returns `kept` and the buckets by their digests."""
        with self._lock:
            held = self.kept, self._buckets
            self.kept = ""
            self._buckets = {}
            return held

    def _forget(self, starts: bool = False) -> int:
        """Returns the number of what comes next."""
        with self._lock:
            self._number += 1
            self._started = starts
            self._received = None
            return self._number

    def update(self, fields: Mapping[str, Any]) -> None:
        """Receive and verify all tensors.

        Args:
            fields: of the `UpdateInfo`

        Raises: TransferError; the update has to be started again.
        Communicates: every byte, once, from the trainer's ranks.
        """
        started = self._started
        number = self._forget()
        require(started, "an update that was not started", "/start_weight_update first")
        info = UpdateInfo.parse(to_json(fields))
        kept, held = self.forget_kept()  # changed in place: after a failure all bytes have to come
        if info.base is None:
            held = {}
        require(info.base in (None, kept), f"changes, but {NO_BASE}", "all bytes")
        incoming = IncomingTensors(self._expected(info.only), info.version, held)
        tensors = _receive(info, incoming, self.device)
        # the trainer that asked may have left, and another one begun
        with self._lock:
            require(number == self._number, "an update that was dropped", "it to be the last one")
            self._received = info, tensors
            if info.keep is not None:
                self._buckets = incoming.buckets
                self.kept = info.keep

    def finish(self, version: int | None = None) -> tuple[UpdateInfo, dict[str, Tensor]]:
        """The update info, and name -> tensor for the engine to load; both are dropped here.

        Args:
            version: that the trainer asks to finish; None: it names none
        """
        received = self._received
        self.drop()
        require(received is not None, "a finish without weights", "an update that succeeded")
        assert received is not None
        came = received[0].version
        require(version in (None, came), f"a finish of version {version}", f"{came}, which came")
        return received

    def _expected(self, only: Collection[str] | None) -> dict[str, tuple[int, ...]]:
        if only is None:
            return self.wanted
        unknown = [name for name in only if name not in self.wanted]
        require(not unknown, f"{unknown[:4]}", "names of tensors that the engine holds")
        return {name: self.wanted[name] for name in only}


def _receive(
    info: UpdateInfo, incoming: IncomingTensors, device: torch.device
) -> dict[str, Tensor]:
    """All tensors of a transfer, verified, from all its senders at once.

    Raises: TransferError naming the sender, also when it cannot be reached, or stops.
    """
    failed = list[TransferError]()
    connections = list[socket.socket]()
    # a sender that broadcasts waits no longer for a connection
    patience = min(info.silence * BROADCAST_SHARE / SILENCE_SHARE, CUT_S)

    def take(sender: SenderAddress) -> None:
        names = ["the first tensor"]
        try:
            with _connected(sender, patience, lambda: bool(failed)) as connection:
                connections.append(connection)
                require(not failed, "another sender that failed", "all of them")
                _take(connection, sender, info, incoming, device, names)
        except (OSError, TransferError) as error:
            place = f"rank {sender.rank} of the trainer at {sender.host}:{sender.port}"
            failed.append(TransferError(f"{_reason(error, info)}; from {place}, at {names[-1]}"))
            for connection in connections:  # the first is the cause: the others end by it
                with suppress(OSError):
                    shut(connection)

    with ThreadPoolExecutor(len(info.senders)) as pool:
        list(pool.map(take, info.senders))
    if failed:
        raise failed[0]
    return incoming.complete()


def _take(
    connection: socket.socket,
    sender: SenderAddress,
    info: UpdateInfo,
    incoming: IncomingTensors,
    device: torch.device,
    names: list[str],
) -> None:
    """The tensors of one sender; ``names`` gets the name of each before its bytes."""
    connection.sendall(HELLO.pack(MAGIC, info.engine, bytes.fromhex(sender.key)))
    connection.settimeout(info.silence)
    read = partial(_read, connection)
    with ExitStack() as stack:
        member: Broadcast | None = None
        if info.broadcast is not None:

            def lost() -> str | None:
                return "the sender left" if gone(connection) else None

            member = stack.enter_context(closing(Broadcast(info.broadcast, device, lost)))
            member.join()
        incoming.take(read, read if member is None else member.transfer, names.append)
        if member is not None:
            member.leave()


def _connected(
    sender: SenderAddress, patience: float, given_up: Callable[[], bool]
) -> socket.socket:
    """A connection to a sender. If the sender's host is lost, it ends after a minute: the next
    trainer waits for that.

    Args:
        patience: longest time without a way to the sender [seconds]
        given_up: True if another sender failed
    """
    place = sender.host, sender.port

    def connect() -> socket.socket:
        return socket.create_connection(place, timeout=CONNECT_TIMEOUT_S)

    try:
        connection = reached(connect, patience, given_up)
    except OSError as error:
        raise TransferError(f"{NO_CONNECTION} ({error}), expected all bytes") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if sender.certificate is None:
        return connection
    try:
        encrypted = secured(connection, sender.certificate)
    except OSError as error:
        connection.close()
        raise TransferError(f"{NO_CONNECTION} by TLS ({error}), expected all bytes") from error
    require(encrypted is not None, "a sender with another certificate", "the trainer's")
    assert encrypted is not None
    return encrypted


def _read(connection: socket.socket, view: memoryview) -> None:
    """Fills the memory; each part has to come within the connection's timeout."""
    count = 0
    while count < len(view):
        size = connection.recv_into(view[count:])
        require(size > 0, f"an end after {count} of {len(view)} bytes", "all of them")
        count += size


def _reason(error: Exception, info: UpdateInfo) -> str:
    if isinstance(error, TransferError):
        return str(error)
    if isinstance(error, TimeoutError) and error.errno is None:  # else of keepalive
        return f"weights: a sender sent nothing for {info.silence:g} s, expected more bytes"
    return f"{NO_CONNECTION} ({error}), expected all bytes"
