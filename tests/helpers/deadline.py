"""Longest time that a test waits for an event."""

from __future__ import annotations

import time
from collections.abc import Callable

# Ends a hang [s], and measures nothing: no wait takes as long, on however busy a machine.
DEADLINE = 900.0


def until(true: Callable[[], object]) -> None:
    """Returns once ``true()`` is; fails after `DEADLINE`."""
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"not true after {DEADLINE:.0f} s"
        time.sleep(0.005)
