"""Waits of a run: each says what it waits for, and a stop signal ends it at once.

`wait_for` is for a wait that looks again and again, `announced` for one inside a library's call.
`stop_waits` is what handlers of SIGTERM and SIGINT call.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

QUIET_S = 5.0  # a wait says its line after so long, and again each time it is twice as old
LOOK_S = 0.25  # between two looks
STOPS = (signal.SIGINT, signal.SIGTERM)

Say = Callable[[str], None]


class Stopped(Exception):
    """A stop signal came during a wait."""


class NotYet(Exception):
    """Raised by a look: the reason why the wait goes on.

    Args:
        at_once: the reason is said now, since waiting alone will not help
    """

    def __init__(self, reason: str, at_once: bool = False):
        super().__init__(reason)
        self.at_once = at_once


def say_on_stderr(line: str) -> None:
    """Print a line."""
    print(line, file=sys.stderr, flush=True)


def say_nothing(line: str) -> None:
    """For ranks whose wait another rank reports."""


class Wait:
    """One wait and what it says about itself. It is on `active` while it can be stopped.

    Args:
        what: it waits for, and for whom
        limit: longest time [s]; None: there is none
        advice: what the user can do, as a sentence
        say: takes a line
    """

    active: set[Wait] = set()  # noqa: RUF012 (of the process)

    def __init__(
        self, what: str, limit: float | None = None, advice: str = "", say: Say = say_on_stderr
    ):
        self.what = what
        self.limit = limit
        self.advice = advice
        self.say = say
        self.reason = ""
        self.began = time.monotonic()
        self.began_clock = time.time()
        self.due = QUIET_S
        self.thread = threading.current_thread()
        self.stop = threading.Event()
        self.number: int | None = None  # of the signal that stops it
        self._said_at_once = ""

    @property
    def seconds(self) -> float:
        """Its age [s]."""
        return time.monotonic() - self.began

    def goes_on(self, reason: str = "", at_once: bool = False) -> None:
        """Say the line if it is due, or if ``reason`` has to be said at once and is new."""
        self.reason = reason
        is_new = at_once and reason != self._said_at_once
        if is_new:
            self._said_at_once = reason
        if self.seconds >= self.due:
            self.due = 2 * self.seconds
        elif not is_new:
            return
        self.say(self.line())

    def line(self) -> str:
        """What it waits for, why, for how long so far and until when, and what to do."""
        reason = f": {self.reason}" if self.reason else ""
        end = "without a limit"
        if self.limit is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(self.began_clock + self.limit))
            end = f"at most {self.limit:g} s, until {clock}"
        advice = f". {self.advice}" if self.advice else ""
        return f"waiting for {self.what}{reason}; {self.seconds:.0f} s so far, {end}{advice}"

    def stopped(self) -> Stopped:
        """The error that ends it."""
        name = signal.Signals(self.number).name if self.number else "a stop"
        return Stopped(f"{name} while waiting for {self.what}")

    @contextmanager
    def counted(self) -> Generator[Wait]:
        """`stop_waits` stops it in the block. Raises: `Stopped` then."""
        self.active.add(self)
        try:
            yield self
        except KeyboardInterrupt:  # of `stop_waits`, or of another handler
            if self.stop.is_set():
                raise self.stopped() from None
            raise
        finally:
            self.active.discard(self)


def wait_for[T](
    what: str,
    look: Callable[[], T],
    limit: float | None = None,
    advice: str = "",
    say: Say = say_on_stderr,
) -> T:
    """The result of ``look``, as soon as it does not raise `NotYet`.

    Args:
        look: is called every `LOOK_S` and returns soon
        what, limit, advice, say: as for `Wait`

    Raises: RuntimeError when ``limit`` is over; `Stopped`; what ``look`` raises.
    """
    with Wait(what, limit, advice, say).counted() as wait:
        while True:
            try:
                return look()
            except NotYet as not_yet:
                wait.goes_on(str(not_yet), not_yet.at_once)
            if limit is not None and wait.seconds >= limit:
                text = f"waited {limit:g} s for {what}, expected no longer: {wait.reason}"
                raise RuntimeError(f"{text}. {advice}" if advice else text)
            if wait.stop.wait(LOOK_S):
                raise wait.stopped()


@contextmanager
def announced(
    what: str,
    limit: float | None = None,
    advice: str = "",
    say: Say = say_on_stderr,
    signals_kill: bool = False,
) -> Generator[None]:
    """Report a call that waits inside a library, from a thread.

    Args:
        signals_kill: SIGINT and SIGTERM end the process, as if it had no handler: the call runs no
            Python code for long, or waits for its own threads before it raises an error
        what, limit, advice, say: as for `Wait`

    Raises: `Stopped` when `stop_waits` is called in the block.
    """
    over = threading.Event()
    wait = Wait(what, limit, advice, say)

    def report() -> None:
        while not over.wait(wait.due - wait.seconds):
            wait.goes_on()

    reporter = threading.Thread(target=report, name="wait", daemon=True)
    reporter.start()
    kill = signals_kill and threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in STOPS if kill}
    try:
        with wait.counted():
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        over.set()
        reporter.join()


def stop_waits(number: int) -> bool:
    """End all waits of this process, in a handler of the signal ``number``.

    Returns: whether there was one; it ends with `Stopped` in its thread.
    Raises: KeyboardInterrupt, which libraries pass on, when the main thread, in which handlers run,
        is in one; the wait makes `Stopped` of it.
    """
    waits = [*Wait.active]
    for wait in waits:
        wait.number = number
        wait.stop.set()
    for wait in waits:
        if wait.thread is threading.main_thread():
            raise KeyboardInterrupt
    return bool(waits)
