"""Wall time by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch.profiler import record_function


class Clock:
    """Adds up the wall time of named phases: ``with clock("time/rollout"): ...``.

    A trace of torch's profiler shows the phase as "pyrl: rollout".

    A phase may be entered many times, and inside another phase; each counts everything that happens
    inside it. On a GPU, work that a phase launched without waiting for it is counted in the phase
    that waits, unless ``sync`` is given.

    Args:
        sync: called before a phase is entered and before it is left, such as
            ``torch.cuda.synchronize``; None waits for nothing.
        on_phase: called with the name of the phase on entering it and with that of the surrounding
            phase (None: no phase) on leaving it. It is not called on leaving with an error, so that
            the listener still knows the phase of the error.

    Attributes:
        seconds: phase -> wall time since the last `take`.
    """

    def __init__(
        self,
        sync: Callable[[], object] | None = None,
        on_phase: Callable[[str | None], None] | None = None,
    ) -> None:
        self._sync = sync or (lambda: None)
        self._on_phase = on_phase or (lambda _: None)
        self._phase: str | None = None
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Count the time inside the ``with`` block as phase ``name``, also if it raises."""
        outer = self._phase
        self._phase = name
        self._on_phase(name)
        self._sync()
        start = time.perf_counter()
        try:
            with record_function(f"pyrl: {name.removeprefix('time/')}"):
                yield
                self._sync()
            self._on_phase(outer)
        finally:
            self._phase = outer
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call; counting starts again from zero."""
        seconds = self.seconds
        self.seconds = {}
        return seconds
