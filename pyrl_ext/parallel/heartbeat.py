"""Heartbeats between the processes of a run: which rank died or hangs, and where it was.

A collective that waits for a dead rank reports little, and late: gloo names a socket, NCCL may hang
forever. So each rank writes a heartbeat to the rendezvous store once a second, with the phase and
the step it is in. A daemon thread does that, since a phase may take hours.

A rank reads a few keys a second, however many ranks there are: the heartbeats of ranks at
`DISTANCES`, and two keys that all ranks share. ``alarm`` asks all to be less patient, because a
collective failed somewhere; ``cause`` is why the run ends, from the first rank that knows.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from pyrl_ext.parallel.topology import Topology, launched

INTERVAL = 1.0  # seconds between two heartbeats; the numbers below count intervals
SILENT = 20  # without a heartbeat, then a rank counts as dead; torchrun kills the rest after 30 s
SUSPECT = 5  # the same once a collective failed on any rank
ROLL_CALL = 4  # before that, the ranks on the same host are watched too: it may be gone as a whole
WAIT = 2 * SUSPECT + 2  # for the name of a dead rank, until an error counts as this rank's
GRACE = 5  # for the main thread to end the process, before the monitor thread does
DISTANCES = (1, 2, 4, 8)  # from a rank to those that it watches: on its host and on the next ones
START = timedelta(minutes=5)  # for the first heartbeat of every watched rank
STORE = -1  # stands for the store among the watched ranks


class Beat(NamedTuple):
    """One rank's heartbeat. A rising ``serial``: alive. ``left``: the rank exited normally, so
    silence is expected."""

    serial: int
    place: str
    left: bool


class Process(NamedTuple):
    """The process of a rank, and its host, which runs ``ranks`` ranks from ``first`` on."""

    host: str
    address: str
    pid: int
    first: int
    ranks: int

    @property
    def mates(self) -> range:
        """The ranks of its host."""
        return range(self.first, self.first + self.ranks)


class MissedBeats:
    """How often in a row a counter of heartbeats had not moved when it was looked at."""

    def __init__(self) -> None:
        self.count = 0
        self._last: int | None = None

    def see(self, beats: int | None) -> int:
        """Look at the counter; None: there is none to look at. Returns the count."""
        unmoved = beats is not None and beats == self._last
        self.count = self.count + 1 if unmoved else 0
        self._last = beats
        return self.count


def watched_by(rank: int, world_size: int) -> list[int]:
    """The ranks whose heartbeats ``rank`` reads.

    The next one is always among them, so whichever ranks die, a rank that lives watches one of
    them.
    """
    return [(rank + step) % world_size for step in DISTANCES if step < world_size]


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
        self.rank = topo.rank
        self.world_size = topo.world_size
        names = (topo.module, *topo.beside) if topo.has_modules else ()
        self._whose = f"{' and '.join(names)}'s " if names else ""
        self.step: int | None = None
        self._phase: str | None = None
        self.cause: str | None = None
        self._decided = threading.Event()
        self._error: str | None = None  # raised in the main thread
        self._suspects = False  # a rank may be gone: a collective failed, or torchrun ends this one
        self._terminated = False  # SIGTERM came
        self._beats: dict[int, Beat] = {}  # the newest of each watched rank
        self._processes: dict[int, Process] = {}  # those read so far
        self._mates: tuple[int, ...] = ()  # on the hosts of silent ranks, watched for a while
        self._called = 0  # times that they were looked for
        self._alarmed = False  # this rank told all to be less patient
        self._answers = 0  # from the store
        self._broken: str | None = None  # why the connection to the store is lost
        self._flushing = threading.Event()
        self._left = threading.Event()
        self._wake = threading.Event()
        if self.world_size > 1:
            self._start()

    def enter(self, phase: str | None) -> None:
        """Name the phase that this rank is in, for the next heartbeat, which is sent at once."""
        self._phase = phase and phase.removeprefix("time/")
        self._wake.set()

    @property
    def place(self) -> str:
        """The phase and step of this rank, as in ``update of step 7``; with its modules where
        the run has several, as in ``vision's update of step 7``."""
        if self.step is None:
            return f"{self._whose}start-up"
        inside = "" if self._phase in (None, "step") else f"{self._phase} of "
        return f"{self._whose}{inside}step {self.step}"

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
            self._wake.set()  # the alarm is for all
            if self._decided.wait(WAIT * INTERVAL):
                self._flush()
                self._exit()
        self._decide(f"{self._name(self.rank)} failed in {self.place}: {self._error}")
        self._flush()  # the monitor stays: leaving the process groups may hang

    # internals ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Communicates: an all-reduce of two numbers over the world; the first heartbeats by the
        store, and where the watched ranks run."""
        self._host = os.environ.get("MASTER_ADDR", "localhost")
        here, there = _route(self._host)
        fresh = uuid.uuid4().int >> 65 if self.rank == 0 else 0
        beside_store = self.rank if here == there else self.world_size
        numbers = torch.tensor([fresh, -beside_store])
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        run = numbers[0].item()
        beside_store = -int(numbers[1])
        self._run = f"heartbeat/{run:x}"  # torchrun may start a run again at the same store
        self._watched = watched_by(self.rank, self.world_size)
        self._store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        first = self.rank - launched("LOCAL_RANK", 0)
        ranks = launched("LOCAL_WORLD_SIZE", 1)
        mine = Process(socket.gethostname(), here, os.getpid(), first, ranks)
        self._store.set(self._process_key(self.rank), json.dumps(mine))
        if self.rank == 0:
            self._store.set(f"{self._run}/cause", "")
            self._store.set(f"{self._run}/alarm", "")
        self._send(0)
        self._wait_for([self.rank, *self._watched])
        self._store.wait([f"{self._run}/cause", f"{self._run}/alarm"], START)
        self._store_ranks: list[int] = []
        if beside_store < self.world_size:
            self._wait_for([beside_store])
            self._store_ranks = self._mates_of([beside_store])
            self._wait_for(self._store_ranks)
        self._exchange_thread = threading.Thread(
            target=self._exchange, name="heartbeat-exchange", daemon=True
        )
        self._monitor_thread = threading.Thread(
            target=self._monitor, name="heartbeat-monitor", daemon=True
        )
        self._exchange_thread.start()
        self._monitor_thread.start()
        self._on_sigterm = signal.signal(signal.SIGTERM, self._note)

    def _beat_key(self, rank: int) -> str:
        return f"{self._run}/{rank}/beat"

    def _process_key(self, rank: int) -> str:
        return f"{self._run}/{rank}/process"

    def _wait_for(self, ranks: list[int]) -> None:
        """Wait for the first heartbeats of ``ranks``, and learn where they run."""
        self._store.wait([self._beat_key(rank) for rank in ranks], START)
        for rank in ranks:
            self._find(rank)

    def _find(self, rank: int) -> bool:
        """Learn where ``rank`` runs; whether it ever sent a heartbeat."""
        if rank not in self._processes:
            if not self._store.check([self._beat_key(rank)]):  # the other key is written before it
                return False
            text = self._store.get(self._process_key(rank))
            self._processes[rank] = Process(*json.loads(text))
        return True

    def _mates_of(self, ranks: list[int]) -> list[int]:
        """All ranks on the hosts of ``ranks``, rising."""
        mates = {mate for rank in ranks for mate in self._processes[rank].mates}
        return sorted(mates.intersection(range(self.world_size)))

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        """torchrun ends the other ranks when one dies: find out which before this one ends."""
        self._suspects = self._terminated = True

    def _send(self, count: int) -> None:
        beat = Beat(count, self.place, self._left.is_set())
        self._store.set(self._beat_key(self.rank), json.dumps(beat))
        if self._suspects and not self._alarmed:
            self._alarmed = True
            self._store.set(f"{self._run}/alarm", "1")
        if self.cause is not None:
            self._store.compare_set(f"{self._run}/cause", "", self.cause)  # the first one counts

    def _exchange(self) -> None:
        count = 0
        received = 0.0
        try:
            while True:
                self._wake.clear()
                last = self._flushing.is_set()
                count += 1
                self._send(count)
                if last:
                    return
                if time.monotonic() - received > INTERVAL / 2:  # phases may change faster
                    self._receive()
                    received = time.monotonic()
                self._wake.wait(INTERVAL)
        except RuntimeError as error:
            self._broken = str(error)

    def _receive(self) -> None:
        ranks = [*self._watched, *(rank for rank in self._mates if self._find(rank))]
        shared = [f"{self._run}/cause", f"{self._run}/alarm"]
        answer = self._store.multi_get(shared + [self._beat_key(rank) for rank in ranks])
        cause, alarm, *beats = answer
        self._beats = {r: Beat(*json.loads(each)) for r, each in zip(ranks, beats, strict=True)}
        self._answers += 1
        self._suspects = self._suspects or bool(alarm)
        self._alarmed = self._alarmed or bool(alarm)
        if cause:
            self._decide(cause.decode())

    def _monitor(self) -> None:
        missed = {who: MissedBeats() for who in (*self._watched, STORE)}
        grace = GRACE
        wait = WAIT
        while not self._left.wait(INTERVAL):
            if self.cause is not None:
                grace -= 1
                if grace <= 0:
                    self._exit()
                continue
            counts = {rank: beat.serial for rank, beat in self._beats.items() if not beat.left}
            counts[STORE] = self._answers
            for who in {*missed, *counts}:
                missed.setdefault(who, MissedBeats()).see(counts.get(who))
            wait -= self._terminated
            if cause := self._find_cause({who: beats.count for who, beats in missed.items()}):
                self._decide(cause)
            elif not wait:
                self._decide(f"{self._name(self.rank)} was ended by SIGTERM in {self.place}")

    def _find_cause(self, missed: dict[int, int]) -> str | None:
        patience = SUSPECT if self._suspects else SILENT
        if self._broken is not None or missed[STORE] >= patience:
            return self._without_store()
        silent = [rank for rank in self._watched if missed[rank] >= patience - ROLL_CALL]
        self._called = self._called + 1 if silent else 0
        self._mates = tuple(set(self._mates_of(silent)).difference(self._watched, {self.rank}))
        if max(missed[rank] for rank in self._watched) < patience or self._called <= ROLL_CALL:
            return None
        silent = [rank for rank in self._watched if missed[rank] >= patience - 2]
        silent += [mate for mate in self._mates if missed.get(mate, 0) >= ROLL_CALL - 2]
        return f"no heartbeat for {patience * INTERVAL:.0f} s from " + self._names(silent)

    def _without_store(self) -> str:
        text = f"the store on {self._host} does not answer ({self._broken or 'timed out'}): "
        if not self._store_ranks or self.rank in self._store_ranks:
            return text + "torchrun, or whatever ran the store, has ended"
        names = self._names(self._store_ranks)
        return text + f"torchrun there, the host or its network is down, {names}"

    def _names(self, ranks: list[int]) -> str:
        return "; ".join(
            f"{self._name(rank)}, last heard in {self._beats[rank].place}"
            if rank in self._beats
            else self._name(rank)
            for rank in sorted(ranks)
        )

    def _name(self, rank: int) -> str:
        host, address, pid, *_ = self._processes[rank]
        return f"rank {rank} ({host} {address}, pid {pid})"

    def _decide(self, cause: str) -> None:
        self.cause = self.cause or cause  # the first one counts
        self._decided.set()
        self._wake.set()

    def _flush(self) -> None:
        self._flushing.set()
        self._wake.set()
        self._exchange_thread.join(2 * INTERVAL)  # it blocks when the store's host is gone

    def _exit(self) -> NoReturn:
        """Exit at once: a collective may never return, and destroying its group may hang too.

        Without an error the main thread is still busy or waits: its stack says with what.
        """
        text = f"error: {self.cause}\n  rank {self.rank} ended in {self.place}"
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
        stack = "".join(traceback.format_stack(frame)).rstrip()
        more = f": {self._error}" if self._error else f"; its stack:\n{stack}"
        sys.stdout.flush()
        print(text + more, file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def heartbeats(topo: Topology) -> Iterator[Heartbeat]:
    """Exchange heartbeats while the block runs; an error in it is reported to the other ranks.

    When another rank fails, dies, or hangs for ``SILENT`` seconds, the process exits with code 1
    and the name of that rank; files stay as they are, as after a kill.

    Communicates: an all-reduce of two numbers over the world; then, by the store, a key that each
    rank writes and six that it reads a second, of 100 bytes each.
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
