"""Wall time by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the wall time of named phases: ``with clock("time/rollout"): ...``.

    A phase may be entered many times, and inside another one; each counts all that happens
    inside it. On a GPU, work that a phase launched and did not wait for is counted where the
    waiting happens, unless ``sync`` is given.

    Args:
        sync: called before a phase is entered and before it is left, such as
            ``torch.cuda.synchronize``; None waits for nothing.
    """

    def __init__(self, sync: Callable[[], object] | None = None) -> None:
        self._sync = sync or (lambda: None)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside the ``with`` block as phase ``name``, also if it raises."""
        self._sync()
        start = time.perf_counter()
        try:
            yield
            self._sync()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take_one(self, name: str) -> float:
        """Seconds of one phase since it was last taken."""
        return self._seconds.pop(name)

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; counting starts anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds
