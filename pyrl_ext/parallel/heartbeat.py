"""Heartbeats between the processes of a run: which rank died or hangs, and in which phase.

A collective that waits for a dead rank reports little, and late: gloo names a socket, NCCL may hang
forever. So a thread of each rank writes a heartbeat to the rendezvous store once a second, with the
rank's phase and step. Rank 0 reads all heartbeats, the other ranks read that of rank 0. All read
two more keys: ``alarm``, set when a collective failed anywhere, shortens the patience; ``cause`` is
why the run ends, from the first rank that knows.

After the last step torchrun waits for every process, without a limit. So all but rank 0 send
heartbeats until they exit, and rank 0 exits after them, or with an error if one falls silent.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # pyright: ignore[reportPrivateUsage]

from pyrl_ext.parallel.collective_errors import AgreedError, gather_objects
from pyrl_ext.parallel.external_groups import own_address
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.parallel.waiting import stop_waits

INTERVAL = 1.0  # seconds between two heartbeats; the numbers below count intervals
SILENT = 20  # without a heartbeat, then a rank counts as dead; torchrun kills the rest after 30 s
SUSPECT = 5  # the same once a collective failed on any rank
WAIT = 2 * SUSPECT + 2  # for the name of a dead rank, until an error counts as this rank's
GRACE = 5  # for the main thread to end the process, before the monitor thread does
START = timedelta(minutes=5)  # for the first heartbeats
STORE = -1  # stands for the store among the watched ranks
EXITS = "its exit"  # the place of a process that needs no more heartbeats
LOOKS = 10  # in an interval, at the processes that have not exited


class Process(NamedTuple):
    """The process of a rank. ``has_store``: its host runs the store. ``run``: names the keys."""

    host: str
    address: str
    pid: int
    has_store: bool
    run: str


class Missed:
    """Counts for each rank the looks in a row at which its heartbeat had not moved.

    Attributes:
        looks: rank -> their number
    """

    def __init__(self):
        self.looks = Counter[int]()
        self._seen: dict[int, int] = {}

    def look(self, serials: Mapping[int, int]) -> None:
        """``serials``: rank -> number of its last heartbeat."""
        for rank, serial in serials.items():
            self.looks[rank] = self.looks[rank] + 1 if serial == self._seen.get(rank) else 0
        self._seen = dict(serials)


class Heartbeat:
    """The heartbeat of this rank, and the watch over those of others. With one rank, no thread.

    Two threads: one talks to the store and blocks when the store's host is gone; the other counts
    missed heartbeats while it is itself awake, so that a suspended process blames no other.

    Attributes:
        step: the step this rank is in; None during start-up. Set by the training loop.
        cause: what ended the run, once that is known.
        advice: the last line if another rank ends this one. Set by the training loop.
    """

    def __init__(self, topo: Topology):
        self.rank = topo.rank
        self.world_size = topo.world_size
        names = (topo.module, *topo.colocated) if topo.has_modules else ()
        self._module = f"{' and '.join(names)}'s " if names else ""
        self.step: int | None = None
        self.cause: str | None = None
        self.advice = ""
        self._phase: str | None = None
        self._error: str | None = None  # raised in the main thread
        self._suspects = False  # a collective failed somewhere, or SIGTERM came
        self._terminated = False  # SIGTERM came
        self._beats: dict[int, tuple[int, str]] = {}  # watched rank -> (serial number, place)
        self._answers = 0  # from the store
        self._broken: str | None = None  # why the connection to the store is lost
        self._decided = threading.Event()
        self._last = threading.Event()
        self._left = threading.Event()
        self._exits = False
        self._wake = threading.Event()
        if self.world_size > 1:
            self._start()

    def enter(self, phase: str | None) -> None:
        """Name the phase that this rank is in, for the next heartbeat, which is sent at once."""
        self._phase = phase and phase.removeprefix("time/")
        self._wake.set()

    @property
    def place(self) -> str:
        """Phase and step of this rank, and its modules if the run has several:
        ``vision's update of step 7``."""
        if self._exits:
            return EXITS
        if self.step is None:
            return f"{self._module}start-up"
        phase = "" if self._phase in (None, "step") else f"{self._phase} of "
        return f"{self._module}{phase}step {self.step}"

    def leave(self) -> None:
        """End the watch over other ranks, until rank 0 exits. Communicates: a barrier of the world.

        A process that ends without its `atexit` handlers counts as silent.
        """
        if self.world_size > 1:
            dist.barrier()
            self._left.set()
            if self.rank == 0:
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
        self._error = f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, RuntimeError):
            self._suspects = True
            self._wake.set()
            if self._decided.wait(WAIT * INTERVAL):
                self._flush()
                self._exit()
        self._decide(f"{self._name(self.rank)} failed in {self.place}: {self._error}")
        self._flush()  # the monitor stays: leaving the process groups may hang

    def _start(self) -> None:
        """Communicates: a gather of every rank's process over the world, the first heartbeats."""
        self._store_host = os.environ.get("MASTER_ADDR", "localhost")
        here = own_address(self._store_host, None)
        has_store = here in {info[4][0] for info in socket.getaddrinfo(self._store_host, None)}
        run = uuid.uuid4().hex[:16]  # torchrun may start a run again at the same store
        process = Process(socket.gethostname(), here, os.getpid(), has_store, run)
        self._processes = gather_objects(process, dist.group.WORLD)
        store: Any = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._store = PrefixStore(f"heartbeat/{self._processes[0].run}", store)
        self._watched = [*range(1, self.world_size)] if self.rank == 0 else [0]
        self._read = ["cause", "alarm", *map(str, self._watched)]
        if self.rank == 0:
            self._store.set("cause", "")
            self._store.set("alarm", "")
        self._send(0)
        self._store.wait(self._read, START)
        self._exchange_thread = threading.Thread(
            target=self._exchange, name="heartbeat-exchange", daemon=True
        )
        self._monitor_thread = threading.Thread(
            target=self._monitor, name="heartbeat-monitor", daemon=True
        )
        self._exchange_thread.start()
        self._monitor_thread.start()
        self._on_sigterm = signal.signal(signal.SIGTERM, self._note)
        atexit.register(self._exit_in_order)  # now, so that it runs after handlers of the run

    def _note(self, number: int, _frame: FrameType | None) -> None:
        """torchrun ends the other ranks when one dies: find out which before this one ends, unless
        it waits."""
        self._suspects = True
        self._terminated = True
        stop_waits(number)

    def _send(self, serial: int) -> None:
        self._store.set(str(self.rank), json.dumps((serial, self.place)))
        if self._suspects:
            self._store.set("alarm", "1")
        if self.cause is not None:
            self._store.compare_set("cause", "", self.cause)  # the first one counts

    def _exchange(self) -> None:
        received = 0.0
        last = False
        serial = 0
        try:
            while not last:
                self._wake.clear()
                last = self._last.is_set()
                serial += 1
                self._send(serial)
                if time.monotonic() - received > INTERVAL / 2:  # phases may change faster
                    self._receive()
                    received = time.monotonic()
                self._wake.wait(0 if last else INTERVAL)
        except RuntimeError as error:
            self._broken = str(error)

    def _receive(self) -> None:
        cause, alarm, *beats = self._store.multi_get(self._read)
        self._beats = dict(zip(self._watched, map(json.loads, beats), strict=True))
        self._answers += 1
        self._suspects = self._suspects or bool(alarm)
        if cause:
            self._decide(cause.decode())

    def _monitor(self) -> None:
        missed = Missed()
        wait = WAIT
        while not self._left.wait(INTERVAL) and self.cause is None:
            serials = {rank: serial for rank, (serial, _) in self._beats.items()}
            serials[STORE] = self._answers
            missed.look(serials)
            patience = SUSPECT if self._suspects else SILENT
            wait -= self._terminated
            if missed.looks[STORE] >= patience or self._broken is not None:
                ranks = [rank for rank, process in enumerate(self._processes) if process.has_store]
                self._decide(
                    f"the store on {self._store_host} does not answer ({self._broken or 'timeout'})"
                    ": torchrun there has ended, or the host or its network is down; its ranks: "
                    f"{self._names(ranks)}"
                )
            elif max(missed.looks[rank] for rank in self._watched) >= patience:
                silent = [rank for rank in self._watched if missed.looks[rank] >= patience - 2]
                seconds = patience * INTERVAL
                self._decide(f"no heartbeat for {seconds:.0f} s from {self._names(silent)}")
            elif wait <= 0:
                self._decide(f"{self._name(self.rank)} was ended by SIGTERM in {self.place}")
        if not self._left.wait(GRACE * INTERVAL):
            self._exit()

    def _exit_in_order(self) -> None:
        """After `leave`: rank 0 waits for the other processes, and the others say that they exit.
        Rank 0 ends with an error if one of them does not, and sends no heartbeats."""
        if not self._left.is_set():
            return
        if self.rank > 0:
            self._exits = True
            self._flush()
            return
        missed = Missed()
        while True:
            try:
                self._receive()
            except RuntimeError:  # no store: torchrun has ended
                return
            serials = {rank: n for rank, (n, place) in self._beats.items() if place != EXITS}
            if not serials:
                return
            missed.look(serials)
            silent = [rank for rank in serials if missed.looks[rank] >= SILENT * LOOKS]
            if silent:
                print(
                    f"error: no heartbeat for {SILENT * INTERVAL:.0f} s from "
                    f"{self._names(silent)}. All ranks had finished the run, and its files are "
                    "whole; rank 0 ends with an error so that torchrun ends the others",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            time.sleep(INTERVAL / LOOKS)

    def _names(self, ranks: Sequence[int]) -> str:
        return "; ".join(
            f"{self._name(rank)}, last heard in {self._beats[rank][1]}"
            if rank in self._beats
            else self._name(rank)
            for rank in ranks
        )

    def _name(self, rank: int) -> str:
        process = self._processes[rank]
        return f"rank {rank} ({process.host} {process.address}, pid {process.pid})"

    def _decide(self, cause: str) -> None:
        self.cause = self.cause or cause  # the first one counts
        self._decided.set()
        self._wake.set()

    def _flush(self) -> None:
        self._last.set()
        self._wake.set()
        self._exchange_thread.join(2 * INTERVAL)  # it blocks when the store's host is gone

    def _exit(self) -> NoReturn:
        """Exit at once: a collective may never return, and destroying its group may hang too.

        Without an error the main thread is still busy or waits: its stack shows where.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
        stack = "".join(traceback.format_stack(frame)).rstrip()
        detail = f": {self._error}" if self._error else f"; its stack:\n{stack}"
        text = f"error: {self.cause}\n  rank {self.rank} ended in {self.place}{detail}"
        if self.rank == 0 and self.advice:
            text += f"\n{self.advice}"
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def heartbeats(topo: Topology) -> Generator[Heartbeat]:
    """Exchange heartbeats while the block runs; an error in it is reported to the other ranks.

    When another rank fails, dies, or hangs for ``SILENT`` seconds, the process exits with code 1
    and the name of that rank; files stay as they are, as after a kill. An `AgreedError` is every
    rank's, so nobody is named.

    Communicates: a gather of every rank's process over the world, and a barrier at the end;
        between them, by the store, a key that each rank writes and three that it reads a second.
        Rank 0 reads one for each rank.
    """
    heartbeat = Heartbeat(topo)
    try:
        yield heartbeat
        heartbeat.leave()
    except AgreedError:
        heartbeat.leave()
        raise
    except BaseException as error:
        heartbeat.fail(error)
        raise
