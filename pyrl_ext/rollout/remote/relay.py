"""Relay: an engine passes the bytes of new weights on to the next one, while they come.

So a sender's host sends every byte once, however many engines there are. The bytes go on from the
memory in which the engine keeps them, so one that is slow, or gone, delays none before it.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pyrl_ext.parallel.external_groups import family_of
from pyrl_ext.rollout.remote import wire

MEET = 10.0  # longest time for the proofs of a secret [s]
ADMIT = 5.0  # the same, while others wait [s]
BACKENDS = ("gloo", "nccl")  # of a broadcast
MAX_MEMBERS = 1024  # of its group
# of an engine, and of its relay [bytes]
NUMBER = 4
PORT = 2
HELLO = NUMBER + PORT + 2 * wire.PROOF  # both, a nonce and its proof [bytes]


@dataclass(frozen=True, slots=True)
class Way:
    """How the bytes of a sender come to an engine, and where they go on to.

    Args:
        host, port: of the relay of the engine before, or of the store of a broadcast's group; "":
            they come from the sender
        secret: that this engine shares with that one, or that all of the group do
        next_secret: that it shares with the engine after it; "": there is none
        silence: longest time without a byte of the engine before, or of the group [seconds]
        backend: of the group; "": there is none
        rank, size: of this engine in the group, and of the group
    """

    host: str = ""
    port: int = 0
    secret: str = ""
    next_secret: str = ""
    silence: float = MEET
    backend: str = ""
    rank: int = 0
    size: int = 0

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Way:
        """Raises: WireError for fields of other kinds."""
        kinds = {"host": str, "port": int, "secret": str, "next_secret": str}
        kinds |= {"backend": str, "rank": int, "size": int, "silence": (float, int)}
        wire.need_kinds(fields, kinds)
        way = cls(**fields)
        good = bool(way.host) <= way.port < 2**16 and 0 < way.silence < 2**31
        wire.need(good, f"port {way.port}, silence {way.silence}", "numbers in range")
        if way.backend:
            good = (
                way.backend in BACKENDS
                and bool(way.host)
                and 0 < way.rank < way.size <= MAX_MEMBERS
            )
            found = f"rank {way.rank} of {way.size} in a group of {way.backend[:40]!r}"
            wire.need(good, found, f"an engine's, of one of {BACKENDS}")
        return way


class Relay:
    """The way on of the bytes of one sender.

    Args:
        host: address of this engine towards the sender, where the next engine finds it

    Attributes:
        port: where the next engine connects
    """

    def __init__(self, host: str):
        self._door = socket.socket(family_of(host))
        self._door.bind((host, 0))
        self._door.listen(1)
        self.port: int = self._door.getsockname()[1]
        self._views: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._begun = False

    def begin(self, way: Way) -> None:
        """Wait for the next engine, in a thread; without one nothing is passed on."""
        self._begun = bool(way.next_secret)
        if not self._begun:
            self._door.close()
            return
        run = threading.Thread(target=self._run, args=(way,), name="relay", daemon=True)
        run.start()

    def pass_on(self, view: memoryview) -> None:
        """These bytes came; they stay as they are until they are sent."""
        if self._begun:
            self._views.put(view)

    def close(self) -> None:
        """No more come. What came is still sent while this engine continues."""
        self._views.put(None)
        if not self._begun:
            self._door.close()

    def _run(self, way: Way) -> None:
        # whoever waits at the other end says what it misses
        with suppress(OSError, EOFError), self._door:
            connection = self._admitted(way)
            with connection:
                connection.settimeout(way.silence)
                while (view := self._views.get()) is not None:
                    connection.sendall(view)

    def _admitted(self, way: Way) -> socket.socket:
        """The connection of who proves that it knows the secret."""
        end = time.monotonic() + way.silence
        while True:
            self._door.settimeout(max(end - time.monotonic(), 0.001))
            connection, _ = self._door.accept()
            connection.settimeout(ADMIT)
            with suppress(OSError, wire.WireError):
                if _admits(connection, way.next_secret):
                    return connection
            connection.close()


def meet(connection: socket.socket, secret: str, engine: int, port: int = 0) -> None:
    """An engine and who sends to it prove to each other that they know the secret.

    Args:
        engine: number of this one
        port: of its relay; 0: it has none
    """
    read = reader(connection, MEET)
    size = len(wire.MAGIC) + wire.PROOF
    hello = bytearray(size)
    read(memoryview(hello))
    wire.need(hello.startswith(wire.MAGIC), "another protocol", f"{wire.MAGIC!r}")
    theirs = bytes(hello[-wire.PROOF :])
    ours = secrets.token_bytes(wire.PROOF)
    known = engine.to_bytes(NUMBER, "little") + port.to_bytes(PORT, "little")
    connection.sendall(known + ours + wire.prove(secret, known, theirs, ours))
    answer = bytearray(wire.PROOF)
    read(memoryview(answer))
    good = wire.same(bytes(answer), wire.prove(secret, b"sender", ours, theirs))
    wire.need(good, "a sender with another secret", "the one of this transfer")


def numbers_of(hello: bytes) -> tuple[int, int]:
    """The numbers in an engine's hello: its own, and the port of its relay."""
    number = hello[:NUMBER]
    port = hello[NUMBER : NUMBER + PORT]
    return int.from_bytes(number, "little"), int.from_bytes(port, "little")


def answer_to(hello: bytes, secret: str, ours: bytes) -> bytes | None:
    """Proof for an engine that this end knows the secret; None: its hello proves nothing.

    Args:
        ours: the nonce that it got.
    """
    numbers = NUMBER + PORT
    proof = hello[-wire.PROOF :]
    known = hello[:numbers]
    theirs = hello[numbers : -wire.PROOF]
    if not wire.same(proof, wire.prove(secret, known, ours, theirs)):
        return None
    return wire.prove(secret, b"sender", theirs, ours)


def _admits(connection: socket.socket, secret: str) -> bool:
    """True if the engine that connected knows the secret; it is told that this one does."""
    ours = secrets.token_bytes(wire.PROOF)
    connection.sendall(wire.MAGIC + ours)
    hello = bytearray(HELLO)
    reader(connection, ADMIT)(memoryview(hello))
    if (answer := answer_to(bytes(hello), secret, ours)) is not None:
        connection.sendall(answer)
    return answer is not None


def reader(connection: socket.socket, limit: float | None = None) -> wire.Read:
    """Reads from a connection, all of it within ``limit`` [s]; None: as its timeout says."""
    end = None if limit is None else time.monotonic() + limit

    def read(view: memoryview) -> None:
        got = 0
        while got < len(view):
            if end is not None:
                connection.settimeout(max(end - time.monotonic(), 0.001))
            count = connection.recv_into(view[got:])
            wire.need(count > 0, f"an end after {got} of {len(view)} bytes", "all of them")
            got += count

    return read
