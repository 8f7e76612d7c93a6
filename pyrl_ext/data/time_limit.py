"""A time limit for other people's code that runs in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn


class Late(BaseException):
    """The time is over. Not an `Exception`: code that is interrupted does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raises `Late` in the block after ``seconds``. Only in the main thread: other threads get no
    signals, so that their blocks have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_late(_number: int, _frame: object) -> NoReturn:
    raise Late
