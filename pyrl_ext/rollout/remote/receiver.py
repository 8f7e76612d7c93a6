"""Receiver: an engine that takes weights, as a sender sees it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from pyrl_ext.rollout.remote import wire
from pyrl_ext.rollout.remote.relay import Way


@dataclass
class Receiver:
    """One engine of a transfer.

    Attributes:
        host: this host's address towards it
        left: time that it may still take [s]
        at: the tensor that it is taking
        relay: host and port from which the next engine may get the bytes
        first: frame before all others: how they come to it
        direct: they come from here
    """

    address: str
    left: float
    host: str = ""
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    at: str = "the first tensor"
    error: str | None = None
    relay: tuple[str, int] = "", 0
    first: bytes = b""
    direct: bool = True
    met: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    socket: socket.socket | None = None

    def show(self, way: Way) -> None:
        """How the bytes come to it; it is told before its first frame."""
        self.first = wire.way_frame(asdict(way))
        self.direct = not way.host
        self.ready.set()

    def fail(self, reason: str) -> None:
        """It gets no more; the first reason is kept."""
        self.error = self.error or reason
        self.met.set()
        self.ready.set()
        if self.socket is not None:
            with suppress(OSError):  # not closed: a write may be waiting for it
                self.socket.shutdown(socket.SHUT_RDWR)
