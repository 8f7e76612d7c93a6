"""The time limit of other people's code."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest

from pyrl_ext.data.time_limit import Late, time_limit


def stubborn() -> None:
    """Ends for no `Exception`, or after ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with suppress(Exception):
            while time.monotonic() < end:
                pass


def test_time_limit_ends_code_that_catches_every_exception_and_restores_the_signal():
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with pytest.raises(Late), time_limit(0.2):
            stubborn()
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        with time_limit(600):
            assert 590 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, before)


def test_time_limit_leaves_blocks_of_other_threads_alone():
    ended = threading.Event()

    def work() -> None:
        with time_limit(0.01):
            time.sleep(0.1)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended.is_set()
