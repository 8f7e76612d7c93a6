"""Which rank died or hangs, and where it was: signs of life between the processes of a run.

A collective that waits for a dead rank says little and late: gloo names a socket, NCCL may wait for
ever. So every rank tells the others once a second, through the store that they met at, that it
lives and which phase of which step it is in. A daemon thread does that: a phase may take hours.
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

from pyrl_ext.dist.clock import Clock
from pyrl_ext.dist.topology import Topology

BEAT = 1.0  # seconds between two signs of life; the numbers below are in beats
SILENT = 20  # missed by a rank that counts as dead. torchrun kills the others 30 s after a death
SUSPECT = 5  # the same, after a collective failed here
GRACE = 5  # the main thread has to end the process itself, before a thread ends it
WATCHED = 64  # ranks that one rank listens to: the store answers all of them every second
STORE = -1  # among the ranks that a beat is awaited from


class Sign(NamedTuple):
    """What a rank tells: new ``beats`` mean that it lives; a ``verdict`` spreads from rank to rank;
    who ``left`` at the end is not missed."""

    beats: int
    place: str
    verdict: str | None
    left: bool


class Peers:
    """The other ranks as one rank sees them. Alone (``world_size`` 1) it has no thread.

    Two threads: one talks to the store, and blocks when the store's host is gone; the other counts
    the beats that it misses while it is itself awake, so that a process that was starved or asleep
    blames nobody for it.
    """

    def __init__(self, topo: Topology):
        self.rank, self.world_size = topo.rank, topo.world_size
        self.step: int | None = None
        self._phase: str | None = None
        self.verdict: str | None = None  # what ended the run, once that is known
        self._decided = threading.Event()
        self._error: str | None = None  # of the main thread
        self._doubt = False  # a rank may be gone: a collective failed, or torchrun ends this one
        self._told_to_end = False
        self._heard: dict[int, Sign] = {}
        self._answers = 0  # of the store
        self._broken: str | None = None  # the connection to the store, and why
        self._silenced, self._left = threading.Event(), threading.Event()
        self._wake = threading.Event()
        if self.world_size > 1:
            self._start()

    @property
    def phase(self) -> str | None:
        return self._phase

    @phase.setter
    def phase(self, phase: str | None) -> None:
        self._phase = phase
        self._wake.set()

    @property
    def place(self) -> str:
        """``update of step 7``."""
        if self.step is None:
            return "start-up"
        inside = "" if self.phase in (None, "step") else f"{self.phase} of "
        return f"{inside}step {self.step}"

    def leave(self) -> None:
        """The run is over for this rank, which is no fault."""
        if self.world_size > 1:
            self._left.set()
            self._last_words()
            self._judge.join()
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def fail(self, error: BaseException) -> None:
        """Tell the others that ``error`` ended this rank, unless another rank is its cause.

        A RuntimeError may be a collective that lost a rank, and which one is known within seconds:
        then the process ends here, naming it.
        """
        if self.world_size == 1:
            return
        self._error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, RuntimeError):
            self._doubt = True
            if self._decided.wait(2 * SUSPECT * BEAT):
                self._last_words()
                self._exit()
        self._decide(f"{self._name(self.rank)} failed in {self.place}: {self._error}")
        self._last_words()  # the judge stays: leaving the process groups may take for ever

    # how ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Communicates: every rank's host, over the world; then the first signs, by the store."""
        self._host = os.environ.get("MASTER_ADDR", "localhost")
        here, self._there = _route(self._host)
        mine = (socket.gethostname(), here, os.getpid(), uuid.uuid4().hex)
        self._hosts: list[Any] = [None] * self.world_size
        dist.all_gather_object(self._hosts, mine)
        run = self._hosts[0][3]  # torchrun may start a run again at the same store
        self._keys = [f"peers/{run}/{rank}" for rank in range(self.world_size)]
        reach = min(self.world_size - 1, WATCHED)
        self._watched = [(self.rank + 1 + i) % self.world_size for i in range(reach)]
        self._store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._tell(0)
        self._store.wait([self._keys[rank] for rank in self._watched], timedelta(minutes=5))
        self._talk = threading.Thread(target=self._talking, name="peers-talk", daemon=True)
        self._judge = threading.Thread(target=self._judging, name="peers-judge", daemon=True)
        self._talk.start()
        self._judge.start()
        self._on_sigterm = signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        """torchrun ends the other ranks when one dies: find out which before this one goes."""
        self._doubt = self._told_to_end = True

    def _tell(self, beats: int) -> None:
        sign = Sign(beats, self.place, self.verdict, self._left.is_set())
        self._store.set(self._keys[self.rank], json.dumps(sign))

    def _talking(self) -> None:
        beats, listened = 0, 0.0
        keys = [self._keys[rank] for rank in self._watched]
        try:
            while True:
                self._wake.clear()
                last = self._silenced.is_set()
                beats += 1
                self._tell(beats)
                if last:
                    return
                if time.monotonic() - listened > BEAT / 2:  # phases may change faster
                    signs = [Sign(*json.loads(sign)) for sign in self._store.multi_get(keys)]
                    self._heard = dict(zip(self._watched, signs))
                    self._answers += 1
                    listened = time.monotonic()
                self._wake.wait(BEAT)
        except RuntimeError as error:
            self._broken = str(error)

    def _judging(self) -> None:
        missed = dict.fromkeys((*self._watched, STORE), 0)
        before: dict[int, int] = {}
        grace, wait = GRACE, 2 * SUSPECT
        while not self._left.wait(BEAT):
            if self.verdict is not None:
                grace -= 1
                if grace <= 0:
                    self._exit()
                continue
            heard = {rank: sign.beats for rank, sign in self._heard.items() if not sign.left}
            heard[STORE] = self._answers
            for who in missed:
                silent = who in heard and heard[who] == before.get(who)
                missed[who] = missed[who] + 1 if silent else 0
            before = heard
            wait -= self._told_to_end
            if verdict := self._find(missed):
                self._decide(verdict)
            elif not wait:
                self._decide(f"{self._name(self.rank)} was ended by SIGTERM in {self.place}")

    def _find(self, missed: dict[int, int]) -> str | None:
        told = [sign.verdict for sign in self._heard.values() if sign.verdict]
        if told:
            return told[0]
        patience = SUSPECT if self._doubt else SILENT
        if self._broken is not None or missed[STORE] >= patience:
            return self._without_store()
        if max(missed[rank] for rank in self._watched) < patience:
            return None
        silent = [rank for rank in self._watched if missed[rank] >= patience - 2]  # a host at once
        return f"no sign of life for {patience * BEAT:.0f} s from " + self._names(silent)

    def _without_store(self) -> str:
        mine = self._hosts[self.rank][1]
        there = [r for r, host in enumerate(self._hosts) if host[1] == self._there != mine]
        text = f"the store on {self._host} does not answer ({self._broken or 'it is silent'}): "
        if not there:
            return text + "torchrun, or who else ran it, has ended"
        return text + f"torchrun there, the host or its network is gone, {self._names(there)}"

    def _names(self, ranks: list[int]) -> str:
        return "; ".join(
            f"{self._name(rank)}, last heard in {self._heard[rank].place}"
            if rank in self._heard
            else self._name(rank)
            for rank in sorted(ranks)
        )

    def _name(self, rank: int) -> str:
        host, address, process, _ = self._hosts[rank]
        return f"rank {rank} ({host} {address}, pid {process})"

    def _decide(self, verdict: str) -> None:
        self.verdict = self.verdict or verdict  # the first stands
        self._decided.set()
        self._wake.set()

    def _last_words(self) -> None:
        self._silenced.set()
        self._wake.set()
        self._talk.join(2 * BEAT)  # it never ends when the store's host is gone

    def _exit(self) -> NoReturn:
        """At once: a collective may never return, and nor may the end of its process group."""
        text = f"error: {self.verdict}\n  rank {self.rank} ended in {self.place}"
        sys.stdout.flush()
        print(f"{text}: {self._error}" if self._error else text, file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def watched(topo: Topology) -> Iterator[Peers]:
    """Signs of life while the block runs; an error in it is told to the others.

    When another rank fails, dies, or hangs for ``SILENT`` seconds, the process ends with exit code
    1 and the name of that rank; what is on disk stays as it is, as after a kill.

    Communicates: one gather over the world; then 100 bytes a second and watched rank by the store.
    """
    peers = Peers(topo)
    try:
        yield peers
    except BaseException as error:
        peers.fail(error)
        raise
    peers.leave()


class PhaseClock(Clock):
    """A Clock that tells the other ranks which phase this one is in."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer, self._peers.phase = self._peers.phase, name.removeprefix("time/")
        with super().__call__(name):
            yield
        self._peers.phase = outer  # an error leaves it where it happened


def _route(host: str) -> tuple[str, str]:
    """Addresses of this machine, on the network that leads to ``host``, and of ``host``."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(target)  # sends nothing
        return route.getsockname()[0], route.getpeername()[0]
