"""Calls of a reward function under a time limit; a call that keeps the run waiting is reported."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Self

NOTICE_SECONDS = 20.0  # until the first notice about a call; each next one after twice the time
_POLL_SECONDS = 0.1  # resolution of limits and notices
_AGAIN_SECONDS = 1.0  # between signals to a call that catches them

# Not SIGALRM: libraries that verify answers use it for limits inside a reward function.
_SIGNAL = signal.SIGRTMIN + 6


class TimeUp(BaseException):
    """Raised in a call that is over its limit. Not an Exception: reward functions catch those."""

    passes_guard = True


class TimeLimit:
    """Watches calls, one at a time, from a thread; use it as a context manager around them.

    A call over the limit is interrupted by a signal in which `TimeUp` is raised: sleeps, locks,
    sockets and subprocesses end at once, native code that does not return to Python does not.

    Args:
        seconds: limit of a call; None: no limit, only notices.
        notice: takes a line of text about a call that has not returned for a while.
        notice_seconds: until the first notice [s].

    Raises:
        RuntimeError: entered with a limit outside the main thread, where Python allows no signals.
    """

    def __init__(
        self,
        seconds: float | None,
        notice: Callable[[str], None] | None = None,
        notice_seconds: float = NOTICE_SECONDS,
    ):
        self.seconds = seconds
        self.notice_seconds = notice_seconds
        self._notice = notice or _print
        self._call: tuple[Callable[[], str], float] | None = None  # (name, when it began)
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self.seconds is not None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError(
                    f"data.reward_timeout: {self.seconds} with rewards scored in the thread "
                    f"{threading.current_thread().name!r}, expected the main thread"
                )
            self._handler = signal.signal(_SIGNAL, self._interrupt)
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, name="reward time limit", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self.seconds is not None:
            signal.signal(_SIGNAL, self._handler)

    @contextmanager
    def watched(self, name: Callable[[], str]) -> Generator[None]:
        """One call.

        Args:
            name: the call for messages; only called when one is due.

        Raises:
            TimeUp: inside the block, when the limit is over.
        """
        self._call = name, time.monotonic()
        try:
            yield
        finally:
            self._call = None  # a signal that arrives from here on is ignored

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        call = self._call
        limit = self.seconds
        if call is not None and limit is not None and time.monotonic() - call[1] >= limit:
            raise TimeUp

    def _watch(self) -> None:
        main = threading.main_thread().ident
        watched = None
        notice_at = 0.0
        interrupt_at = 0.0
        while not self._over.wait(_POLL_SECONDS):
            if self._call is not watched:
                watched = self._call
                notice_at = self.notice_seconds
                interrupt_at = float("inf") if self.seconds is None else self.seconds
            if watched is None:
                continue
            name, began = watched
            waited = time.monotonic() - began
            if waited >= interrupt_at and main is not None:
                interrupt_at = waited + _AGAIN_SECONDS
                signal.pthread_kill(main, _SIGNAL)
            elif waited >= notice_at:
                notice_at *= 2
                self._notice(f"waiting for {name()}, which has run for {waited:.0f} s")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
