"""Worker processes for user code: rewards, environments and their tools.

User code may hang, exit its process or change it; none of that reaches the process that trains. A
worker serves calls until it dies, or until a call exceeds its time limit: then another takes its
place, and it is killed with all its child processes as soon as nobody has state in it. Workers
import torch only if user code does.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
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

from pyrl_ext.parallel.user_code import describe

_POLL_SECONDS = 0.05  # resolution of time limits
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
    """

    about: Any

    def call(self, owner: int | None, method: str, *args: Any) -> Any:
        """Call user code; method "forget": the owner's state is given up."""
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


@dataclass(frozen=True, slots=True)
class _Reply:
    """The end of a call: its value, or its failure."""

    number: int
    value: Any = None
    failure: CallFailed | None = None


# the worker's side --------------------------------------------------------------------------------


def serve(fd: int, serial: bool) -> None:
    """Run the worker at the other end of a socket, until the pool closes it."""
    connection = Connection(fd)
    try:
        host: Host = connection.recv()()
        connection.send(_Reply(_LOAD, host.about))
    except BaseException as error:
        message = str(error) if isinstance(error, ValueError) else describe(error)
        connection.send(_Reply(_LOAD, failure=CallFailed("load", message)))
        return
    server = _Server(connection, host, serial)
    threading.Thread(target=server.receive, name="requests", daemon=True).start()
    server.run()


class _Server:
    """The calls of one worker.

    Args:
        serial: they run in the main thread, one after the other; else functions run in a thread of
            their call, coroutines in one event loop
    """

    def __init__(self, connection: Connection, host: Host, serial: bool):
        self._connection = connection
        self._host = host
        self._serial = serial
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._queue = SimpleQueue[_Request]()
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        """Run calls in order, or the event loop."""
        while self._serial:
            self._call(self._queue.get())
        asyncio.set_event_loop(self._loop)
        while True:
            # a task that user code began may raise SystemExit, which ends run_forever
            with suppress(BaseException):
                self._loop.run_forever()

    def receive(self) -> None:
        """The thread that takes requests, and ends the process with its pool's."""
        with suppress(EOFError, OSError):
            while True:
                for request in self._connection.recv():
                    if self._serial:
                        self._queue.put(request)
                    else:
                        threading.Thread(target=self._call, args=(request,), daemon=True).start()
        os.killpg(0, signal.SIGKILL)

    def _call(self, request: _Request) -> None:
        try:
            value = self._host.call(request.owner, request.method, *request.args)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            self._finish(request, None, error)
            return
        if inspect.isawaitable(value) and not self._serial:
            asyncio.run_coroutine_threadsafe(self._await(request, value), self._loop)
        else:
            self._finish(request, value, None)

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
            failure = CallFailed("error", f"raised {describe(caught)}", trace)
            reply = _Reply(request.number, failure=failure)
        if os.getpid() != self._process:  # a process that user code forked returned from its call
            os._exit(1)
        with self._sending:
            self._connection.send(reply)


# the pool's side ----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Pending:
    """A call that was sent to a worker.

    Attributes:
        began: when its clock started; None: calls before it still run
    """

    limit: float | None
    future: Future[Any] = field(default_factory=Future[Any])
    began: float | None = None


@dataclass(eq=False)
class _Worker:
    """A worker process.

    Attributes:
        owners: whose state it holds
        retired: a late call still runs; it gets no new owners
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    calls: dict[int, _Pending] = field(default_factory=dict[int, _Pending])
    owners: set[int] = field(default_factory=set[int])
    retired: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, payload: bytes) -> None:
        """Send a pickled message."""
        with self.sending, suppress(OSError):  # it died: the pool's thread finds out
            self.connection.send_bytes(payload)

    def kill(self) -> None:
        """Kill the process with all processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Pool:
    """Worker processes that load the same user code.

    Args:
        key: config key and value, for messages
        load: makes the host in a worker; it is pickled
        workers: most that serve at the same time; each is started when it is needed
        serial: calls of a worker run one after the other in its main thread; else at the same time

    Attributes:
        about: of the host

    Raises:
        ValueError: user code does not load
    """

    def __init__(self, key: str, load: Callable[[], Host], workers: int = 1, serial: bool = False):
        self._load = pickle.dumps(load)
        self._size = workers
        self._serial = serial
        self._lock = threading.RLock()
        self._workers: list[_Worker] = []
        self._of_owner: dict[int, _Worker] = {}
        self._numbers = count()
        self._closed = threading.Event()
        loaded = self._start().calls[_LOAD].future
        self._thread = threading.Thread(target=self._serve, name="workers", daemon=True)
        self._thread.start()
        try:
            self.about = loaded.result()
        except CallFailed as failure:
            self.close()
            message = failure.message
            if failure.reason == "lost":
                message = f"{key}: {message} as it was loaded"
            raise ValueError(message) from None

    def submit(
        self,
        method: str,
        calls: Sequence[tuple[Any, ...]],
        limit: float | None,
        owner: int | None = None,
    ) -> list[Future[Any]]:
        """Send calls to one worker in one message.

        Args:
            method: of the host
            calls: arguments of each
            limit: of each call [s]; None: no limit
            owner: whose state the calls need, which stays in one worker until `release`

        Returns:
            futures, which raise `CallFailed`
        """
        requests = [_Request(next(self._numbers), owner, method, args) for args in calls]
        payload = pickle.dumps(requests)
        pendings = {request.number: _Pending(limit) for request in requests}
        with self._lock:
            worker = self._worker_of(owner)
            worker.calls |= pendings
            if worker not in self._workers:
                self._lose(worker, "its worker process has ended")
        worker.send(payload)
        return [pending.future for pending in pendings.values()]

    def owner(self) -> int:
        """A new owner of state."""
        return next(self._numbers)

    def release(self, owner: int) -> None:
        """Give up the state of an owner."""
        with self._lock:
            if (worker := self._of_owner.pop(owner, None)) is None:
                return
            worker.owners.discard(owner)
        worker.send(pickle.dumps([_Request(next(self._numbers), owner, "forget", ())]))

    def close(self) -> None:
        """Kill all workers."""
        self._closed.set()
        self._thread.join()
        for worker in self._workers:
            worker.kill()
            worker.process.wait()
            worker.connection.close()

    def _worker_of(self, owner: int | None) -> _Worker:
        if owner is not None and owner in self._of_owner:
            return self._of_owner[owner]
        usable = [worker for worker in self._workers if not worker.retired]
        worker = min(usable, key=lambda worker: len(worker.owners), default=None)
        if worker is None or (worker.owners and len(usable) < self._size):
            worker = self._start()
        if owner is not None:
            worker.owners.add(owner)
            self._of_owner[owner] = worker
        return worker

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from pyrl_ext.data.workers import serve; "
            f"serve({theirs.fileno()}, {self._serial})"
        )
        process = subprocess.Popen(
            [sys.executable, "-u", "-X", "faulthandler", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the run alone
        )
        theirs.close()
        worker = _Worker(process, Connection(ours.detach()))
        worker.calls[_LOAD] = _Pending(None)
        worker.send(self._load)
        self._workers.append(worker)
        return worker

    def _serve(self) -> None:
        """The thread that takes what workers send, and watches time limits."""
        while not self._closed.is_set():
            with self._lock:
                workers = [*self._workers]
            ready = wait([worker.connection for worker in workers], _POLL_SECONDS)
            for worker in workers:
                if worker.connection in ready:
                    self._receive_all(worker)
                if worker.process.poll() is not None:
                    self._end(worker)
                elif _LOAD not in worker.calls:
                    self._watch(worker)

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
            if pending is not None and message.failure is not None:
                pending.future.set_exception(message.failure)
            elif pending is not None:
                pending.future.set_result(message.value)

    def _watch(self, worker: _Worker) -> None:
        """Fail the calls that exceed their limit, and retire their worker."""
        now = time.monotonic()
        with self._lock:
            late = list[_Pending]()
            running = 1 if self._serial else None
            for number, pending in list(islice(worker.calls.items(), running)):
                pending.began = pending.began or now
                if pending.limit is not None and now - pending.began > pending.limit:
                    late.append(worker.calls.pop(number))
            worker.retired |= bool(late)
            if worker.retired and not worker.owners:
                worker.kill()
        for pending in late:
            failure = CallFailed("timeout", f"no result after {pending.limit:g} s")
            pending.future.set_exception(failure)

    def _end(self, worker: _Worker) -> None:
        """Fail the calls of a worker whose process has ended."""
        self._receive_all(worker)
        worker.kill()  # also processes that it left
        code = worker.process.wait()
        with self._lock:
            self._workers.remove(worker)
            worker.connection.close()
            self._lose(worker, f"its worker process ended with exit code {code}")

    def _lose(self, worker: _Worker, message: str) -> None:
        lost = [*worker.calls.values()]
        worker.calls.clear()
        for pending in lost:
            pending.future.set_exception(CallFailed("lost", message))
