"""What feeds of turns share: an engine that waits for them, and counts of trajectories."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from pyrl_ext.data.workers import CallFailed
from pyrl_ext.samples import Prompt, Sample, Turn


class Trajectory(Protocol):
    """A trajectory of a feed.

    Attributes:
        seconds: that the engine waited for it, in calls of user code
        samples: once it is done
        dropped: why there are none
        forks: turns whose context did not begin with the turn before
        changed: rows whose routes two turns report differently
    """

    prompt: Prompt
    index: int
    seconds: float
    samples: list[Sample] | None
    dropped: CallFailed | None
    forks: int
    changed: int

    @property
    def number_of_turns(self) -> int:
        """Number of turns that the engine sampled."""
        ...


class WaitingFeed[T: Trajectory]:
    """Turns of all trajectories of a rollout; see `rollout.engine.TurnFeed`.

    Args:
        label: begins the lines about dropped trajectories
        trajectories: number of them
        max_tokens: longest context and response together
        noted: kind of failure -> the first of it, which was printed

    Attributes:
        counts: numbers of the trajectories that are over, to be added up over ranks
        waited: seconds in which the engine had nothing else to do
    """

    def __init__(self, label: str, trajectories: int, max_tokens: int, noted: dict[str, str]):
        self.label = label
        self.trajectories = trajectories
        self.max_tokens = max_tokens
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.waited = 0.0
        self._noted = noted
        self._over: list[T] = []
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def begin(self) -> None:
        """Begin the trajectories, once."""
        raise NotImplementedError

    def ready(self) -> list[Turn]:
        """The turns that may begin now."""
        raise NotImplementedError

    def left(self) -> int:
        """Number of trajectories that are not over."""
        raise NotImplementedError

    def running(self) -> int:
        """Number of calls of user code that may lead to turns."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Readable as soon as user code did something."""
        self.begin()
        return self._file

    def wake(self) -> None:
        """Make the file readable; from any thread."""
        os.eventfd_write(self._file, 1)

    def take(self, wait: bool) -> list[Turn] | None:
        """The turns that came since the last call; None: none will come any more."""
        self.begin()
        turns = self._awake()
        while wait and not turns and self.left():
            if not self.running():
                raise RuntimeError(
                    f"Feed.take: the engine waits, and {self.left()} trajectories wait for "
                    "it, expected an answer to every turn"
                )
            began = time.monotonic()
            files = select.poll()  # select.select takes no file number above 1023
            files.register(self._file, select.POLLIN)
            files.poll()
            self.waited += time.monotonic() - began
            turns = self._awake()
        return turns if turns or self.left() else None

    def answered(self, sample: Sample) -> None:
        """Take what the engine sampled for a turn."""
        raise NotImplementedError

    def over(self) -> Sequence[T]:
        """The trajectories that are over since the last call."""
        over = self._over
        self._over = []
        return over

    def close(self) -> None:
        """Give up the trajectories that are not over."""
        self.counts["max_waited"] = self.waited

    def __del__(self) -> None:
        os.close(self._file)

    def end(self, trajectory: T) -> None:
        """Count a trajectory that is over, and hand it out."""
        self._over.append(trajectory)
        counts = self.counts
        turns = trajectory.number_of_turns
        counts["begun"] += 1
        counts["seconds"] += trajectory.seconds
        if trajectory.dropped is not None:
            dropped = trajectory.dropped
            self.count_drop(f"dropped/{dropped.reason}", f"{dropped}; the trajectory is dropped")
            return
        counts["turns"] += turns
        counts["max_turns"] = max(counts["max_turns"], turns)
        counts["forks"] += trajectory.forks
        counts["changed_rows"] += trajectory.changed

    def count_drop(self, name: str, message: str) -> None:
        """Count a failure, and print the first of its kind."""
        if name not in self._noted:
            self._noted[name] = message
            print(f"{self.label}: {message}", file=sys.stderr, flush=True)
        self.counts[name] += 1

    def _awake(self) -> list[Turn]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._file)
        return self.ready()
