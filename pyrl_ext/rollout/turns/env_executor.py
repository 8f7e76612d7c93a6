"""Calls of environments while the engine runs: none of them holds up the run or each other.

A function runs in a thread of its call, a coroutine in one event loop with all others. A call
over its time limit is given up: `TimeUp` is raised in its thread, its coroutine is cancelled. A
coroutine that blocks the event loop is interrupted; if that does not help, the next calls get
another loop, and after twice the limit the other calls of the blocked one are given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import select
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

from pyrl_ext.data.environment import Dropped
from pyrl_ext.data.time_limit import TimeUp
from pyrl_ext.parallel.user_code import SharedSettings, describe

_POLL_SECONDS = 0.05  # resolution of time limits
_GRACE_SECONDS = 1.0  # for a call that was interrupted, until it is interrupted again or left


@dataclass(eq=False)
class Call:
    """One call of user code.

    Attributes:
        key: whose call it is
        name: for messages
        value: returned, unless ``dropped``
        dropped: why there is no value
        seconds: that it took
    """

    key: Any
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    retries: int
    value: Any = None
    dropped: Dropped | None = None
    seconds: float = 0.0
    over: bool = field(default=False, init=False)
    began: float = field(default_factory=time.monotonic, init=False)
    thread: int | None = field(default=None, init=False)  # inside user code
    loop: _Loop | None = field(default=None, init=False)
    task: asyncio.Task[None] | None = field(default=None, init=False)
    inside: float = field(default=0.0, init=False)  # seconds that its coroutine ran
    others: float = field(default=0.0, init=False)  # of the loop when it began
    again: float = field(default=0.0, init=False)  # when it is interrupted again


class Calls:
    """Runs calls, and hands out those that are over; all methods are for one thread.

    Args:
        timeout: of a call [s]
        retries: calls made again after one that raised
    """

    def __init__(self, timeout: float, retries: int = 0):
        self.timeout = timeout
        self.retries = retries
        self.retried = 0
        self._settings = SharedSettings()
        self._lock = threading.Lock()
        self._open: set[Call] = set()  # not over
        self._overdue: set[Call] = set()  # over, but still inside user code
        self._done: list[Call] = []
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop: _Loop | None = None
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watched, name="environments", daemon=True)
        self._watch.start()

    def fileno(self) -> int:
        """Readable while there are calls that are over."""
        return self._file

    def begin(self, key: Any, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function``; an awaitable that it returns is awaited."""
        call = Call(key, name, function, args, self.retries)
        with self._lock:
            self._open.add(call)
        self._launch(call)

    def ready(self, wait: bool) -> list[Call]:
        """The calls that are over since the last time.

        Args:
            wait: until there is one; there must be one under way.
        """
        if wait:
            (files := select.poll()).register(self._file, select.POLLIN)  # `select`: below 1024
            files.poll()
        with self._lock:
            done = self._done
            self._done = []
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._file)
        return done

    @property
    def under_way(self) -> int:
        """Calls that `ready` has not returned yet."""
        with self._lock:
            return len(self._open) + len(self._done)

    def close(self) -> None:
        """Interrupt what still runs; nothing is waited for."""
        self._closed.set()
        self._watch.join()
        with self._lock:
            left = [*self._open, *self._overdue]
            self._open = set()
            for call in left:
                call.over = True
        for call in left:
            self._interrupt(call)
        if self._loop is not None:
            self._loop.stop()
        os.close(self._file)

    def _launch(self, call: Call) -> None:
        call.began = time.monotonic()
        if inspect.iscoroutinefunction(call.function):
            self._await(call, call.function(*call.args))
        else:
            threading.Thread(target=self._run, args=(call,), name=call.name, daemon=True).start()

    def _run(self, call: Call) -> None:
        value = None
        error = None
        try:
            try:
                call.thread = threading.get_ident()
                value = call.function(*call.args)
            except BaseException as caught:  # also SystemExit and KeyboardInterrupt of user code
                error = caught
            finally:
                call.thread = None
            if error is None and inspect.isawaitable(value):
                self._await(call, _awaited(value))
            else:
                self._finish(call, value, error)
        except TimeUp:  # it came after the call: that is over by then
            pass

    def _await(self, call: Call, coroutine: Coroutine[Any, Any, Any]) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = _Loop()
            call.loop = self._loop
        call.inside = 0.0
        call.others = call.loop.busy
        call.loop.start(call, self._drive(call, call.loop, coroutine))

    async def _drive(self, call: Call, loop: _Loop, coroutine: Coroutine[Any, Any, Any]) -> None:
        value = None
        error = None
        try:
            value = await _timed(coroutine, call, loop)
        except BaseException as caught:
            error = caught
        self._finish(call, value, error)

    def _finish(self, call: Call, value: Any, error: BaseException | None) -> None:
        # what a call changes that outlives its rollout, the next rollout's calls see
        changes = [] if self._closed.is_set() else self._settings.restore()
        dropped = None
        if changes:
            rule = "expected it, and calls beside it, to leave the settings of the process alone"
            dropped = Dropped("settings", f"{call.name}: changed {'; '.join(changes)}, {rule}")
        elif isinstance(error, TimeUp):
            dropped = self._late(call)
        elif error is not None:
            if isinstance(error, Exception) and call.retries and not call.over:
                call.retries = call.retries - 1
                self.retried = self.retried + 1
                return self._launch(call)
            dropped = Dropped("error", f"{call.name}: raised {describe(error)}, expected a result")
        call.value = value
        self._over(call, dropped)

    def _late(self, call: Call) -> Dropped:
        rule = f"expected a result within turns.timeout {self.timeout:g} s"
        return Dropped("timeout", f"{call.name}: no result after {self.timeout:g} s, {rule}")

    def _over(self, call: Call, dropped: Dropped | None) -> None:
        with self._lock:
            self._overdue.discard(call)
            if call.over:
                return
            call.over = True
            call.dropped = dropped
            call.seconds = time.monotonic() - call.began
            call.args = ()
            call.loop = None
            call.task = None
            self._open.discard(call)
            self._done.append(call)
            os.eventfd_write(self._file, 1)

    def _watched(self) -> None:
        """The thread that watches time limits."""
        while not self._closed.wait(min(_POLL_SECONDS, self.timeout / 4)):
            with self._lock:
                calls = [*self._open]
                overdue = [*self._overdue]
            now = time.monotonic()
            for call in calls:
                if self._elapsed(call, now) > self.timeout:
                    self._expire(call, now)
            for call in overdue:
                if now > call.again:
                    call.again = now + min(_GRACE_SECONDS, self.timeout)
                    self._interrupt(call)

    def _elapsed(self, call: Call, now: float) -> float:
        """Seconds of a call; while other coroutines keep the loop busy its clock stops."""
        elapsed = now - call.began
        loop = call.loop
        if loop is None:
            return elapsed
        others = loop.busy - call.others - call.inside
        if (held := loop.held) is not None and held[0] is not call:
            others += now - max(held[1], call.began)
        return elapsed - others

    def _expire(self, call: Call, now: float) -> None:
        loop = call.loop
        task = call.task
        blocks = loop is not None and loop.held is not None and loop.held[0] is call
        dropped = self._late(call)
        if blocks:
            text = f"{dropped}; it blocks the event loop: await, or make it no coroutine"
            dropped = Dropped("blocked", text)
        self._over(call, dropped)
        if loop is None or blocks:
            call.loop = loop
            call.again = now + min(_GRACE_SECONDS, self.timeout)
            with self._lock:
                self._overdue.add(call)
            self._interrupt(call)
        elif task is not None:
            loop.soon(task.cancel)

    def _interrupt(self, call: Call) -> None:
        """Raise `TimeUp` in user code; leave a loop that it has blocked since the last time."""
        loop = call.loop
        if loop is None:
            if (thread := call.thread) is None:
                return
            return _raise_in(thread)
        if loop.held is None or loop.held[0] is not call:
            with self._lock:
                self._overdue.discard(call)
            return
        with self._lock:
            if loop.interrupted is call and self._loop is loop:
                self._loop = None  # the next calls get another
        loop.interrupted = call
        if time.monotonic() - loop.held[1] > 2 * self.timeout:
            self._lose(loop, call)
        if (thread := loop.thread.ident) is not None:
            _raise_in(thread)

    def _lose(self, loop: _Loop, blocks: Call) -> None:
        """Give up the other calls of a loop."""
        with self._lock:
            others = [call for call in self._open if call.loop is loop]
        for call in others:
            why = f"{call.name}: lost with the event loop that {blocks.name} blocks"
            self._over(call, Dropped("blocked", f"{why}, expected one that awaits"))


class _Loop:
    """An event loop in its thread.

    Attributes:
        held: (the call whose coroutine runs now, since when)
        busy: seconds that coroutines ran
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.held: tuple[Call, float] | None = None
        self.busy = 0.0
        self.interrupted: Call | None = None
        self._ends = False
        self.thread = threading.Thread(target=self._run, name="environment loop", daemon=True)
        self.thread.start()

    def start(self, call: Call, coroutine: Coroutine[Any, Any, None]) -> None:
        def begin() -> None:
            call.task = self.loop.create_task(coroutine)

        self.soon(begin)

    def soon(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        def end() -> None:
            self._ends = True
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_soon(self.loop.call_soon, self.loop.stop)

        self.soon(end)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(lambda loop, context: None)
        while not self._ends:
            # a task that user code began may raise SystemExit, which ends the loop's run
            with contextlib.suppress(BaseException):
                self.loop.run_forever()
        self.loop.close()


@types.coroutine
def _timed(
    coroutine: Coroutine[Any, Any, Any], call: Call, loop: _Loop
) -> Generator[Any, Any, Any]:
    """Runs ``coroutine``; the loop knows when it is inside."""
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        began = time.monotonic()
        loop.held = call, began
        try:
            awaited = step(value)
        except StopIteration as end:
            return end.value
        finally:
            loop.held = None
            seconds = time.monotonic() - began
            loop.busy += seconds
            call.inside += seconds
        try:
            step, value = coroutine.send, (yield awaited)
        except BaseException as error:  # cancelled, or closed
            step = coroutine.throw
            value = error


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _raise_in(thread: int) -> None:
    """Raise `TimeUp` in a thread when it runs Python again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeUp))
