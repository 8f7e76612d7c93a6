"""Worker processes for user code: rewards, environments and their tools.

User code may hang, exit its process or change it; none of that reaches the process that trains. A
worker serves calls until it dies, or until a call exceeds its time limit: then another takes its
place, and it is killed with all its child processes as soon as nobody has state in it. Other calls
that it had without state are made again. Workers import torch only if user code does.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Protocol

import psutil

from pyrl_ext.parallel.user_code import describe, place_of

_POLL_SECONDS = 0.05  # resolution of time limits
_GRACE_SECONDS = 5.0  # in which a coroutine that is late, or a call that is given up, has to end
_LOAD_SECONDS = 60.0  # in which a later worker has to load, or five times the first one's time
_LOAD = -1  # number of the call that loads user code


class CallFailed(Exception):
    """A call without a result.

    Args:
        reason: error (the function raised), timeout, lost (its worker), or that of a `Host.read`
        message: the failure, and the rule
        trace: traceback of user code as text
    """

    def __init__(self, reason: str, message: str, trace: str = ""):
        super().__init__(reason, message, trace)
        self.reason = reason
        self.message = message
        self.trace = trace

    def __str__(self) -> str:
        return f"{self.message}\n{self.trace}" if self.trace else self.message


class Host(Protocol):
    """The user code of a worker.

    Attributes:
        about: sent to the pool when the host is loaded
        at_once: calls that a worker runs at the same time. 1: one after the other in its main
            thread; more: coroutines in its event loop, which cancels them at their time limit;
            None: any number, functions in a thread of their call, coroutines in the event loop
    """

    about: Any
    at_once: int | None

    def call(self, owner: int | None, method: str, *args: Any) -> Any:
        """Call user code; method "forget": the owner's state is given up, its calls are to end."""
        ...

    def read(self, method: str, value: Any) -> Any:
        """The returned value as plain types. Raises: CallFailed."""
        ...


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    owner: int | None
    method: str
    args: tuple[Any, ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class _Reply:
    """The end of a call: its value, or its failure."""

    number: int
    value: Any = None
    failure: CallFailed | None = None


# the worker's side --------------------------------------------------------------------------------


def serve(fd: int, alone: bool) -> None:
    """Run the worker at the other end of a socket, until the pool closes it.

    Args:
        alone: calls run one after the other, whatever the host says
    """
    connection = Connection(fd)
    threading.Thread(target=_end_with_pool, args=(fd,), name="pool", daemon=True).start()
    try:
        host: Host = connection.recv()()
        at_once = 1 if alone else host.at_once
        connection.send(_Reply(_LOAD, (host.about, at_once)))
    except BaseException as error:
        message = str(error) if isinstance(error, ValueError) else describe(error)
        connection.send(_Reply(_LOAD, failure=CallFailed("load", message)))
        return
    server = _Server(connection, host, at_once)
    threading.Thread(target=server.receive, name="requests", daemon=True).start()
    server.run()


def _end_with_pool(fd: int) -> None:
    """The thread that kills the process, with those that it started, when its pool's ends."""
    ended = select.poll()
    ended.register(fd, 0)  # no messages, only that the other side was closed
    ended.poll()
    _end_process()


def _end_process() -> None:
    """Kill this process, with those that it started."""
    kill_all(descendants(psutil.Process()))
    os.killpg(0, signal.SIGKILL)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """The processes that a process started, and those that they did, in any session; none if it has
    ended, or if no file is left to look with."""
    with suppress(psutil.Error, OSError):
        return process.children(recursive=True)
    return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, some of which may have ended."""
    for process in processes:
        with suppress(psutil.Error, OSError):
            process.kill()


class _Server:
    """The calls of one worker.

    Args:
        at_once: as of `Host`
    """

    def __init__(self, connection: Connection, host: Host, at_once: int | None):
        self._connection = connection
        self._host = host
        self._at_once = at_once
        self._room = asyncio.Semaphore(at_once or 1)
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._queue = SimpleQueue[_Request]()
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        """Run calls in order, or the event loop."""
        while self._at_once == 1:
            self._call(self._queue.get())
        asyncio.set_event_loop(self._loop)
        while True:
            # a task that user code began may raise SystemExit, which ends run_forever
            with suppress(BaseException):
                self._loop.run_forever()

    def receive(self) -> None:
        """The thread that takes requests; it ends the process if it cannot take one."""
        try:
            while True:
                for request in self._connection.recv():
                    if self._at_once == 1:
                        self._queue.put(request)
                    elif self._at_once is None:
                        threading.Thread(target=self._call, args=(request,), daemon=True).start()
                    else:
                        asyncio.run_coroutine_threadsafe(self._call_in_room(request), self._loop)
        except (EOFError, OSError):  # the pool's process has ended
            pass
        except BaseException:  # the arguments of a call do not unpickle
            traceback.print_exc()
        _end_process()

    def _call(self, request: _Request) -> None:
        try:
            value = self._host.call(request.owner, request.method, *request.args)
            if inspect.isawaitable(value) and self._at_once == 1:
                value = self._loop.run_until_complete(_result(value))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            self._finish(request, None, error)
            return
        if inspect.isawaitable(value):
            asyncio.run_coroutine_threadsafe(self._await(request, value), self._loop)
        else:
            self._finish(request, value, None)

    async def _call_in_room(self, request: _Request) -> None:
        """Call a coroutine function as soon as fewer than ``at_once`` calls run."""
        value = None
        error = None
        async with self._room:
            timeout = asyncio.timeout(request.limit)
            try:
                async with timeout:
                    value = self._host.call(request.owner, request.method, *request.args)
                    if inspect.isawaitable(value):
                        value = await value
            except BaseException as caught:
                error = _late(request) if timeout.expired() else caught
        self._finish(request, value, error)

    async def _await(self, request: _Request, awaitable: Awaitable[Any]) -> None:
        value = None
        error = None
        try:
            value = await awaitable
        except BaseException as caught:
            error = caught
        self._finish(request, value, error)

    def _finish(self, request: _Request, value: Any, error: BaseException | None) -> None:
        try:
            if error is not None:
                raise error
            reply = _Reply(request.number, self._host.read(request.method, value))
        except CallFailed as failure:
            reply = _Reply(request.number, failure=failure)
        except BaseException as caught:
            trace = "".join(traceback.format_exception(caught))[-20_000:]
            trace = trace.encode("utf-8", "backslashreplace").decode()
            failure = CallFailed("error", f"raised {describe(caught)}{place_of(caught)}", trace)
            reply = _Reply(request.number, failure=failure)
        if os.getpid() != self._process:  # a process that user code forked returned from its call
            os._exit(1)
        with self._sending:
            self._connection.send(reply)


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _late(request: _Request) -> CallFailed:
    return CallFailed("timeout", f"no result after {request.limit:g} s")


# the pool's side ----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Pending:
    """A call that was sent to a worker.

    Attributes:
        began: when its clock started; None: calls before it still run
        repeated: its first worker did not load user code
    """

    request: _Request
    future: Future[Any] = field(default_factory=Future[Any])
    began: float | None = None
    repeated: bool = False


@dataclass(eq=False)
class _Worker:
    """A worker process.

    Attributes:
        alone: it runs calls one after the other, since one of them may have ended another worker
        at_once: as of `Host`, once it is loaded
        calls: without a result yet, in the order in which they run
        owners: whose state it holds
        started: on the monotonic clock [s]
        loaded: its host is there
        failure: why it did not load, for messages
        retired: a call still runs that is late or given up; it gets no new owners
        given_up: calls that still run, and since when on the monotonic clock [s]; 0.0: it loads
        outbox: pickled messages, which a thread sends: a worker that hangs may take none
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    alone: bool
    at_once: int | None = None
    calls: dict[int, _Pending] = field(default_factory=dict[int, _Pending])
    owners: set[int] = field(default_factory=set[int])
    started: float = field(default_factory=time.monotonic)
    loaded: bool = False
    failure: str | None = None
    retired: bool = False
    given_up: dict[int, float] = field(default_factory=dict[int, float])
    outbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue[bytes | None])

    def send_all(self) -> None:
        """Send the messages of the outbox, until one is None."""
        while (payload := self.outbox.get()) is not None:
            with suppress(OSError):  # it died: the pool's thread finds out
                self.connection.send_bytes(payload)

    def kill(self) -> None:
        """Kill the process with all processes that it started."""
        below: list[psutil.Process] = []
        if self.process.poll() is None:
            with suppress(psutil.Error, OSError):  # it ends now, or no file is left to look with
                below = descendants(psutil.Process(self.process.pid))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        kill_all(below)


class Pool:
    """Worker processes that load the same user code.

    Args:
        key: config key and value, for messages
        load: makes the host in a worker; it is pickled
        workers: most that serve at the same time; each is started when it is needed

    Attributes:
        about: of the host

    Raises:
        ValueError: user code does not load
    """

    def __init__(self, key: str, load: Callable[[], Host], workers: int = 1):
        self._load = pickle.dumps(load)
        self._size = workers
        self._lock = threading.RLock()
        self._workers: list[_Worker] = []
        self._of_owner: dict[int, _Worker] = {}
        self._numbers = count()
        self._closed = threading.Event()
        self._broken: str | None = None  # why no thread takes what workers send
        self._load_limit = math.inf  # of a worker [s]; nothing is known about the first one
        began = time.monotonic()
        loaded = self._start().calls[_LOAD].future
        self._thread = threading.Thread(target=self._serve, name="workers", daemon=True)
        self._thread.start()
        try:
            self.about, _ = loaded.result()
        except CallFailed as failure:
            self.close()
            message = failure.message
            if failure.reason == "lost":
                message = f"{key}: {message}"
            raise ValueError(message) from None
        except BaseException:  # Ctrl-C
            self.close()
            raise
        self._load_limit = max(_LOAD_SECONDS, 5 * (time.monotonic() - began))

    def submit(
        self,
        method: str,
        calls: Sequence[tuple[Any, ...]],
        limit: float | None,
        owner: int | None = None,
    ) -> list[Future[Any]]:
        """Send calls to workers: those of an owner to its worker, others to the least busy ones.

        Without an owner, a call whose worker ends because of another call is made again. If that
        may have been any of several calls, they are made one after the other in a separate worker.

        Args:
            method: of the host
            calls: arguments of each
            limit: of each call [s]; None: no limit
            owner: whose state the calls need, which stays in one worker until `release`

        Returns:
            futures, which raise `CallFailed`
        """
        requests = [_Request(next(self._numbers), owner, method, args, limit) for args in calls]
        pendings = [_Pending(request) for request in requests]
        with self._lock:
            parts = self._parts(owner, pendings)
        self._send(parts)
        return [pending.future for pending in pendings]

    def owner(self) -> int:
        """A new owner of state."""
        return next(self._numbers)

    def release(self, owner: int) -> None:
        """Give up the state of an owner."""
        with self._lock:
            if (worker := self._of_owner.pop(owner, None)) is None:
                return
            worker.owners.discard(owner)
        worker.outbox.put(pickle.dumps([_Request(next(self._numbers), owner, "forget", ())]))

    def give_up(self, owner: int, failure: CallFailed) -> None:
        """Fail the calls of an owner that still run, and give up its state.

        Its worker is retired, as after a late call, unless they end within a few seconds.
        """
        with self._lock:
            if (worker := self._of_owner.get(owner)) is None:
                return
            pendings = [call for call in worker.calls.values() if call.request.owner == owner]
            for pending in pendings:
                del worker.calls[pending.request.number]
                worker.given_up[pending.request.number] = 0.0
        self.release(owner)
        for pending in pendings:
            pending.future.set_exception(failure)

    def has_loaded(self, owner: int) -> bool:
        """True if the worker of an owner has loaded user code."""
        with self._lock:
            worker = self._of_owner.get(owner)
            return worker is not None and worker.loaded

    def close(self) -> None:
        """Kill all workers."""
        self._closed.set()
        self._thread.join()
        for worker in self._workers:
            worker.kill()
            worker.process.wait()
            worker.outbox.put(None)
            worker.connection.close()
        self._workers.clear()

    def _parts(self, owner: int | None, pendings: list[_Pending]) -> dict[_Worker, list[_Pending]]:
        """The worker of each call."""
        if owner is None:
            return self._spread(pendings, self._size)
        return {self._worker_of(owner): pendings}

    def _spread(self, pendings: Sequence[_Pending], size: int) -> dict[_Worker, list[_Pending]]:
        """The worker of each call without an owner: the one with the fewest calls.

        Args:
            size: most workers; another one starts while there are fewer and all have calls
        """
        usable = [w for w in self._workers if not w.retired and not w.alone]
        loads = {worker: len(worker.calls) for worker in usable}
        parts: dict[_Worker, list[_Pending]] = {}
        for pending in pendings:
            worker = min(loads, key=lambda worker: loads[worker], default=None)
            if worker is None or (loads[worker] and len(loads) < size):
                worker = self._start()
                loads[worker] = 0
            loads[worker] += 1
            parts.setdefault(worker, []).append(pending)
        return parts

    def _send(self, parts: dict[_Worker, list[_Pending]]) -> None:
        """Send calls to their workers, each worker's in one message."""
        payloads = {w: pickle.dumps([p.request for p in part]) for w, part in parts.items()}
        with self._lock:
            for worker, part in parts.items():
                worker.calls |= {pending.request.number: pending for pending in part}
                worker.outbox.put(payloads[worker])
                if self._broken is not None:
                    worker.calls.clear()
                    _fail(part, self._broken)
                elif worker not in self._workers:
                    self._lose(worker, "its worker process has ended")

    def _worker_of(self, owner: int) -> _Worker:
        if owner in self._of_owner:
            return self._of_owner[owner]
        usable = [worker for worker in self._workers if not worker.retired]
        worker = min(usable, key=lambda worker: len(worker.owners), default=None)
        if worker is None or (worker.owners and len(usable) < self._size):
            worker = self._start()
        worker.owners.add(owner)
        self._of_owner[owner] = worker
        return worker

    def _start(self, alone: bool = False) -> _Worker:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from pyrl_ext.data.workers import serve; "
            f"serve({theirs.fileno()}, {alone})"
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the run alone
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = _Worker(process, Connection(ours.detach()), alone)
        worker.calls[_LOAD] = _Pending(_Request(_LOAD, None, "load", ()))
        worker.outbox.put(self._load)
        self._workers.append(worker)
        try:
            threading.Thread(target=worker.send_all, name="requests", daemon=True).start()
        except RuntimeError:  # no more threads
            worker.kill()
            raise
        return worker

    def _serve(self) -> None:
        """The thread that takes what workers send, and watches time limits. All calls fail with
        it."""
        try:
            self._serve_workers()
        except BaseException as error:
            with self._lock:
                self._broken = f"the thread of its worker pool ended: {describe(error)}"
                lost = [pending for w in self._workers for pending in w.calls.values()]
                for worker in self._workers:
                    worker.calls.clear()
            _fail(lost, self._broken)
            raise

    def _serve_workers(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                workers = [*self._workers]
            ready = wait([worker.connection for worker in workers], _POLL_SECONDS)
            for worker in workers:
                if worker.connection in ready:
                    self._receive_all(worker)
                if worker.process.poll() is not None:
                    self._end(worker)
                elif worker.loaded:
                    self._watch(worker)
                elif worker.failure is None:
                    self._watch_load(worker)

    def _receive_all(self, worker: _Worker) -> None:
        """Take the messages that are there."""
        while worker.connection.poll():
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                worker.kill()
                return
            with self._lock:
                pending = worker.calls.pop(message.number, None)
                worker.given_up.pop(message.number, None)
                if message.number == _LOAD and message.failure is None:
                    _, worker.at_once = message.value
                    worker.loaded = True
                elif message.number == _LOAD:
                    worker.failure = f"its worker process did not load: {message.failure.message}"
                    worker.kill()  # a thread of user code may keep it
            if pending is not None and message.failure is not None:
                pending.future.set_exception(message.failure)
            elif pending is not None:
                pending.future.set_result(message.value)

    def _watch_load(self, worker: _Worker) -> None:
        """Kill a worker that takes too long to load."""
        if time.monotonic() - worker.started > self._load_limit:
            limit = f"{self._load_limit:.0f} s"
            worker.failure = f"its worker process did not load user code within {limit}"
            worker.kill()

    def _watch(self, worker: _Worker) -> None:
        """Fail the calls that exceed their limit, and retire their worker."""
        now = time.monotonic()
        cancels = worker.at_once is not None and worker.at_once > 1  # unless its loop hangs
        grace = _GRACE_SECONDS if cancels else 0.0
        with self._lock:
            late = list[_Pending]()
            for pending in islice(worker.calls.values(), worker.at_once):
                pending.began = pending.began or now
                limit = pending.request.limit
                if limit is not None and now - pending.began > limit + grace:
                    late.append(pending)
            if late and cancels and len(worker.calls) > 1:
                worker.kill()  # any of its calls may have stopped the loop
                return
            for pending in late:
                del worker.calls[pending.request.number]
            for number, since in worker.given_up.items():
                worker.given_up[number] = since or now
                worker.retired |= now - worker.given_up[number] > _GRACE_SECONDS
            worker.retired |= bool(late) or (worker.alone and not worker.calls)
            if worker.retired and not worker.owners:
                worker.kill()
        for pending in late:
            pending.future.set_exception(_late(pending.request))

    def _end(self, worker: _Worker) -> None:
        """Fail or repeat the calls of a worker whose process has ended."""
        self._receive_all(worker)
        worker.kill()  # also processes that it left
        code = worker.process.wait()
        with self._lock:
            self._workers.remove(worker)
            worker.outbox.put(None)
            worker.connection.close()
            message = f"its worker process ended with exit code {code}"
            if not worker.loaded and worker.failure is None:
                worker.failure = f"{message} as it was loaded"
            self._lose(worker, message)
            worker.retired = True

    def _lose(self, worker: _Worker, message: str) -> None:
        """Fail the call that ended a worker, or all if they need its state; make others again."""
        calls = [*worker.calls.values()]
        worker.calls.clear()
        for pending in calls:
            pending.began = None
        if worker.failure is not None:
            self._lose_unloaded(worker, calls, worker.failure)
            return
        running = len(calls)
        if worker.at_once is not None:
            running = 0 if worker.retired else worker.at_once
        suspects = calls[:running]
        others = calls[running:]
        if worker.at_once is not None and len(suspects) > 1:
            self._repeat(suspects, message, alone=True, size=1)
            suspects = []
        self._repeat(others, message, worker.alone, self._size)
        _fail(suspects, message)

    def _lose_unloaded(self, worker: _Worker, calls: list[_Pending], message: str) -> None:
        """Make calls without an owner again, each once: none began. Workers that load get them."""
        again: list[_Pending] = []
        lost: list[_Pending] = []
        for pending in calls:
            request = pending.request
            if request.number == _LOAD or request.owner is not None or pending.repeated:
                lost.append(pending)
            else:
                pending.repeated = True
                again.append(pending)
        self._repeat(again, message, worker.alone, size=1)
        _fail(lost, message)

    def _repeat(self, pendings: list[_Pending], message: str, alone: bool, size: int) -> None:
        """Send calls of a worker that ended to others, or fail them if none can start.

        Args:
            message: how it ended
            alone: they are made one after the other
            size: as of `_spread`
        """
        if not pendings:
            return
        try:
            parts = {self._alone(): pendings} if alone else self._spread(pendings, size)
        except (OSError, RuntimeError) as error:  # no more processes, memory, files or threads
            _fail(pendings, f"{message}; another did not start: {describe(error)}")
            return
        self._send(parts)

    def _alone(self) -> _Worker:
        """The worker that runs calls one after the other."""
        for worker in self._workers:
            if worker.alone and not worker.retired:
                return worker
        return self._start(alone=True)


def _fail(pendings: Sequence[_Pending], message: str) -> None:
    """End calls whose worker is lost."""
    for pending in pendings:
        pending.future.set_exception(CallFailed("lost", message))
