"""A task that becomes harder as the policy solves it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pyrl_ext.data.mixed_prompts import Prompts
from pyrl_ext.prompt import Prompt


class RisingTask:
    """A stream of prompts of one level after another, each of which begins when the mean reward of
    a step reaches a bound.

    Args:
        levels: streams, the easiest first
        rise_at: the bound
        ahead: steps that may have been generated before the rewards of a step are known

    Attributes:
        starts: steps at which the second level, the third, ... begin, as far as they are known
    """

    def __init__(self, levels: Sequence[Prompts], rise_at: float, ahead: int = 0):
        self.levels = levels
        self.rise_at = rise_at
        self.ahead = ahead
        self.starts: list[int] = []

    def level(self, step: int) -> int:
        """Number of the level of a step, from 0."""
        return min(bisect_right(self.starts, step), len(self.levels) - 1)

    def note(self, step: int, reward: float) -> bool:
        """Take the mean reward of a step; True if it makes the next level begin."""
        if len(self.starts) + 1 >= len(self.levels) or reward < self.rise_at:
            return False
        if self.starts and step < self.starts[-1]:  # it still had prompts of the level before
            return False
        self.starts.append(step + self.ahead + 1)
        return True

    def take(self, step: int, n: int, first: int | None = None) -> list[Prompt]:
        """See `Prompts.take`; the same for the same `starts`."""
        return self.levels[self.level(step)].take(step, n, first)

    def held_out(self, n: int) -> list[Prompt]:
        """See `Prompts.held_out`; of the last level, so that evaluations can be compared."""
        return self.levels[-1].held_out(n)
