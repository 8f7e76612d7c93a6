"""Heartbeats between the processes of a run: which rank died or hangs, and where it was.

A collective that waits for a dead rank reports little, and late: gloo names a socket, NCCL may hang
forever. So each rank writes a heartbeat to the rendezvous store once a second, with the phase and
the step it is in. A daemon thread does that, since a phase may take hours.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from pyrl_ext.dist.topology import Topology

INTERVAL = 1.0  # seconds between two heartbeats; the numbers below count intervals
SILENT = 20  # without a heartbeat, then a rank counts as dead; torchrun kills the rest after 30 s
SUSPECT = 5  # the same once a collective failed here
GRACE = 5  # for the main thread to end the process, before the monitor thread does
WATCHED = 64  # ranks that one rank watches: the store answers all of them every interval
STORE = -1  # stands for the store among the watched ranks


class Beat(NamedTuple):
    """One rank's heartbeat. Rising ``serial``: alive. ``cause``: why the run ended, passed on by
    every rank that reads it. ``left``: the rank exited normally, so silence is expected."""

    serial: int
    place: str
    cause: str | None
    left: bool


class MissedBeats:
    """How often in a row a counter of heartbeats had not moved when it was looked at."""

    def __init__(self) -> None:
        self.count = 0
        self._last: int | None = None

    def see(self, beats: int | None) -> int:
        """Look at the counter; None: there is none to look at. Returns the count."""
        unmoved = beats is not None and beats == self._last
        self.count, self._last = self.count + 1 if unmoved else 0, beats
        return self.count


class Heartbeat:
    """The heartbeat of this rank, and the watch over those of others. With one rank, no thread.

    Two threads: one talks to the store and blocks when the store's host is gone; the other counts
    the heartbeats it misses while it is itself awake, so that a process that was starved or
    suspended does not blame the others for it.

    Attributes:
        step: the step this rank is in; None during start-up. Set by the training loop.
        cause: what ended the run, once that is known.
    """

    def __init__(self, topo: Topology):
        self.rank, self.world_size = topo.rank, topo.world_size
        self.step: int | None = None
        self._phase: str | None = None
        self.cause: str | None = None
        self._decided = threading.Event()
        self._error: str | None = None  # raised in the main thread
        self._suspects = False  # a rank may be gone: a collective failed, or torchrun ends this one
        self._terminated = False  # SIGTERM came
        self._beats: dict[int, Beat] = {}  # the newest of each watched rank
        self._answers = 0  # from the store
        self._broken: str | None = None  # why the connection to the store is lost
        self._flushing, self._left = threading.Event(), threading.Event()
        self._wake = threading.Event()
        if self.world_size > 1:
            self._start()

    def enter(self, phase: str | None) -> None:
        """Name the phase that this rank is in, for the next heartbeat, which is sent at once."""
        self._phase = phase and phase.removeprefix("time/")
        self._wake.set()

    @property
    def place(self) -> str:
        """The phase and step of this rank, as in ``update of step 7``."""
        if self.step is None:
            return "start-up"
        inside = "" if self._phase in (None, "step") else f"{self._phase} of "
        return f"{inside}step {self.step}"

    def leave(self) -> None:
        """End the heartbeat of this rank without an error."""
        if self.world_size > 1:
            self._left.set()
            self._flush()
            self._monitor_thread.join()
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that ``error`` ended this one, unless another rank caused it.

        A RuntimeError may be a collective that lost a rank. Which rank is known within seconds;
        then the process exits here with the name of that rank.
        """
        if self.world_size == 1:
            return
        self._error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, RuntimeError):
            self._suspects = True
            if self._decided.wait(2 * SUSPECT * INTERVAL):
                self._flush()
                self._exit()
        self._decide(f"{self._name(self.rank)} failed in {self.place}: {self._error}")
        self._flush()  # the monitor stays: leaving the process groups may hang

    # internals ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Communicates: a gather of hosts over the world; the first heartbeats by the store."""
        self._host = os.environ.get("MASTER_ADDR", "localhost")
        here, self._there = _route(self._host)
        mine = (socket.gethostname(), here, os.getpid(), uuid.uuid4().hex)
        self._hosts: list[Any] = [None] * self.world_size
        dist.all_gather_object(self._hosts, mine)
        run = self._hosts[0][3]  # torchrun may start a run again at the same store
        self._keys = [f"heartbeat/{run}/{rank}" for rank in range(self.world_size)]
        reach = min(self.world_size - 1, WATCHED)
        self._watched = [(self.rank + 1 + i) % self.world_size for i in range(reach)]
        self._store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._send(0)
        self._store.wait([self._keys[rank] for rank in self._watched], timedelta(minutes=5))
        self._exchange_thread = threading.Thread(
            target=self._exchange, name="heartbeat-exchange", daemon=True
        )
        self._monitor_thread = threading.Thread(
            target=self._monitor, name="heartbeat-monitor", daemon=True
        )
        self._exchange_thread.start()
        self._monitor_thread.start()
        self._on_sigterm = signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        """torchrun ends the other ranks when one dies: find out which before this one ends."""
        self._suspects = self._terminated = True

    def _send(self, count: int) -> None:
        beat = Beat(count, self.place, self.cause, self._left.is_set())
        self._store.set(self._keys[self.rank], json.dumps(beat))

    def _exchange(self) -> None:
        count, received = 0, 0.0
        keys = [self._keys[rank] for rank in self._watched]
        try:
            while True:
                self._wake.clear()
                last = self._flushing.is_set()
                count += 1
                self._send(count)
                if last:
                    return
                if time.monotonic() - received > INTERVAL / 2:  # phases may change faster
                    beats = [Beat(*json.loads(each)) for each in self._store.multi_get(keys)]
                    self._beats = dict(zip(self._watched, beats, strict=True))
                    self._answers += 1
                    received = time.monotonic()
                self._wake.wait(INTERVAL)
        except RuntimeError as error:
            self._broken = str(error)

    def _monitor(self) -> None:
        missed = {who: MissedBeats() for who in (*self._watched, STORE)}
        grace, wait = GRACE, 2 * SUSPECT
        while not self._left.wait(INTERVAL):
            if self.cause is not None:
                grace -= 1
                if grace <= 0:
                    self._exit()
                continue
            counts = {rank: beat.serial for rank, beat in self._beats.items() if not beat.left}
            counts[STORE] = self._answers
            for who, beats in missed.items():
                beats.see(counts.get(who))
            wait -= self._terminated
            if cause := self._find_cause({who: beats.count for who, beats in missed.items()}):
                self._decide(cause)
            elif not wait:
                self._decide(f"{self._name(self.rank)} was ended by SIGTERM in {self.place}")

    def _find_cause(self, missed: dict[int, int]) -> str | None:
        received = [beat.cause for beat in self._beats.values() if beat.cause]
        if received:
            return received[0]
        patience = SUSPECT if self._suspects else SILENT
        if self._broken is not None or missed[STORE] >= patience:
            return self._without_store()
        if max(missed[rank] for rank in self._watched) < patience:
            return None
        silent = [rank for rank in self._watched if missed[rank] >= patience - 2]  # a whole host
        return f"no heartbeat for {patience * INTERVAL:.0f} s from " + self._names(silent)

    def _without_store(self) -> str:
        mine = self._hosts[self.rank][1]
        there = [r for r, host in enumerate(self._hosts) if host[1] == self._there != mine]
        text = f"the store on {self._host} does not answer ({self._broken or 'timed out'}): "
        if not there:
            return text + "torchrun, or whatever ran the store, has ended"
        return text + f"torchrun there, the host or its network is down, {self._names(there)}"

    def _names(self, ranks: list[int]) -> str:
        return "; ".join(
            f"{self._name(rank)}, last heard in {self._beats[rank].place}"
            if rank in self._beats
            else self._name(rank)
            for rank in sorted(ranks)
        )

    def _name(self, rank: int) -> str:
        host, address, process, _ = self._hosts[rank]
        return f"rank {rank} ({host} {address}, pid {process})"

    def _decide(self, cause: str) -> None:
        self.cause = self.cause or cause  # the first one counts
        self._decided.set()
        self._wake.set()

    def _flush(self) -> None:
        self._flushing.set()
        self._wake.set()
        self._exchange_thread.join(2 * INTERVAL)  # it blocks when the store's host is gone

    def _exit(self) -> NoReturn:
        """Exit at once: a collective may never return, and destroying its group may hang too."""
        text = f"error: {self.cause}\n  rank {self.rank} ended in {self.place}"
        sys.stdout.flush()
        print(f"{text}: {self._error}" if self._error else text, file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def heartbeats(topo: Topology) -> Iterator[Heartbeat]:
    """Exchange heartbeats while the block runs; an error in it is reported to the other ranks.

    When another rank fails, dies, or hangs for ``SILENT`` seconds, the process exits with code 1
    and the name of that rank; files stay as they are, as after a kill.

    Communicates: one gather over the world; then 100 bytes a second and watched rank by the store.
    """
    heartbeat = Heartbeat(topo)
    try:
        yield heartbeat
    except BaseException as error:
        heartbeat.fail(error)
        raise
    heartbeat.leave()


def _route(host: str) -> tuple[str, str]:
    """This machine's address on the network that leads to ``host``, and the address of ``host``."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(target)  # sends nothing
        return route.getsockname()[0], route.getpeername()[0]
