"""The loop of a run with remote engines, and a step of it, in tokens and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Pause = Literal["finish", "keep", "abort"]


class Trajectory(NamedTuple):
    """Tokens of a prompt, and of the answer of every turn."""

    prompt: int
    turns: tuple[int, ...]


Group = tuple[Trajectory, ...]


@dataclass(frozen=True)
class Loop:
    """A run in tokens and seconds."""

    engines: int
    slots: int
    """Sequences that an engine decodes at a time."""
    token: Callable[[int], float]
    """Seconds of a token of so many sequences."""
    read: Callable[[int], float]
    """Seconds in which an engine reads so many tokens and decodes none."""
    train: float
    """Seconds of the trainer's passes in a step."""
    publish: float
    """Seconds in which weights are published; engines wait."""
    groups: Callable[[int], Sequence[Group]]
    """The groups that a step asks for."""
    keep: int
    """The number of them that it trains on: the first."""
    ahead: int = 0
    """Steps that are asked for before it is their turn."""
    pause: Pause = "abort"
    latency: float = 0.0
    """Seconds after each turn in which an environment answers."""
    carry: bool = False
    """Other groups go on, for the next step alone, which asks for so many fewer; else they are
    aborted."""
    gather: float | None = None
    """Seconds at the begin of a publish in which the trainer waits and engines do not; None: it
    waits for all of it, as they do."""
    beside: float = 0.0
    """Seconds of the trainer's passes that do not wait for the rest of the publish."""


class Step(NamedTuple):
    """One step of the trainer [seconds since the start]."""

    began: float
    """The trainer was done with the step before."""
    published: float
    ready: float
    """The last of its samples came, or the trainer did."""
    trained: float
    ages: tuple[tuple[int, float], ...]
    """(versions between generating and training, tokens)."""


@dataclass(frozen=True)
class Steady:
    """A step of a run that goes on for long: means over the last simulated steps."""

    ahead: int
    seconds: float
    train: float
    publish: float
    """Seconds of a step in which the trainer only publishes, including its waiting for
    requests to finish."""
    wait: float
    """Seconds of a step in which the trainer waits for samples, or for engines to get what is
    published beside its passes."""
    busy: float
    """Share of the time in which an engine decodes or reads, mean over engines."""
    running: float
    """Sequences that run, on all engines, on average."""
    queued: float
    """Requests that wait for an engine, on average."""
    ready: float
    """Finished trajectories that wait to be trained on, on average."""
    age: float
    """Versions between generating and training on a token, on average."""
    oldest: int

    @property
    def trainer_idle(self) -> float:
        """Share of a step in which the trainer waits."""
        return self.wait / self.seconds

    @property
    def engines_idle(self) -> float:
        """Share of a step in which an engine has nothing to do, or is paused."""
        return 1 - self.busy
