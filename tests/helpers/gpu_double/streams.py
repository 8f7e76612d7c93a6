"""Streams of the double: queues whose work runs as late, or as early, as events allow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.helpers.gpu_double.seen import SEEN, place

LATE = "late"
EARLY = "early"
AT_ONCE = "at once"
"""Orders: side streams run when something waits for them; the default stream does, and side streams
run at once; every stream runs at once, which is how a CPU computes."""


class Stream:
    """A queue of work. Its work runs in order; only events order it with that of others."""

    def __init__(self, *_: Any, default: bool = False, **__: Any):
        self.default = default
        self.submitted = self.done = 0
        self._queue: deque[Callable[[], None]] = deque()
        self.stream_id = len(STREAMS)
        STREAMS.append(self)

    @property
    def runs_at_once(self) -> bool:
        """True if work runs when it is submitted."""
        return ORDER[0] == AT_ONCE or (ORDER[0] == LATE) == self.default

    def submit(self, work: Callable[[], None]) -> None:
        """Add ``work`` to the queue."""
        self._queue.append(work)
        self.submitted += 1
        if self.runs_at_once:
            self.drain()

    def drain(self, until: int | None = None) -> None:
        """Run the work in front of place ``until`` of the queue; None: all of it."""
        until = self.submitted if until is None else until
        with _disable_current_modes(), torch.no_grad():
            while self.done < until and self._queue:
                work = self._queue.popleft()
                self.done += 1
                work()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return self.done == self.submitted

    def synchronize(self) -> None:
        SEEN.wait("Stream.synchronize")
        self.drain()


class Event:
    """A place in the queue of the stream that recorded it."""

    def __init__(self, *_: Any, **__: Any):
        self._at: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self._at = (stream, stream.submitted)

    def wait(self, stream: Stream | None = None) -> None:
        """Later work of ``stream`` runs behind this place."""
        if self._at is not None:
            recorder, until = self._at
            (stream or current_stream()).submit(lambda: recorder.drain(until))

    def query(self) -> bool:
        return self._at is None or self._at[0].done >= self._at[1]

    def synchronize(self) -> None:
        SEEN.wait("Event.synchronize")
        if self._at is not None:
            recorder, until = self._at
            recorder.drain(until)


ORDER = [AT_ONCE]
STREAMS: list[Stream] = []
DEFAULT = Stream(default=True)
_local = threading.local()


def current_stream(*_: Any) -> Stream:
    """The stream to which this thread submits."""
    return getattr(_local, "stream", DEFAULT)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Submit to ``stream`` in this block."""
    before = current_stream()
    _local.stream = stream or before
    try:
        yield
    finally:
        _local.stream = before


def drain_all() -> None:
    """Run everything that was submitted to any stream."""
    for stream in STREAMS:
        stream.drain()


class DeviceModule:
    """The double's ``torch.cuda``; ``torch.get_device_module`` returns it."""

    Stream = Stream
    Event = Event
    current_stream = staticmethod(current_stream)
    stream = staticmethod(on_stream)

    def synchronize(self, *_: Any) -> None:
        SEEN.wait(f"synchronize at {place()}")
        drain_all()

    def empty_cache(self) -> None:
        """Nothing: what is freed is not kept."""

    def set_device(self, *_: Any) -> None:
        """Let this thread use the device; the main one does where it rehearses."""
        from tests.helpers.gpu_double.tensor import Device

        if threading.current_thread() is not threading.main_thread():
            Device().__enter__()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the generator of the CPU, which is seeded itself."""
