"""The loop of a run with engines apart, in tokens and seconds: the input of its simulation."""

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
    """Seconds in which weights are published; engines and trainer wait."""
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
