"""Number of steps that engines generate ahead of the trainer: as few as it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SPARE = 4
"""Steps in a row at which the next one is complete as well, after which one less is ahead."""


@dataclass
class LookAhead:
    """Decides how many steps begin after a publish.

    Attributes:
        spare: steps in a row at which the next one was complete as well
    """

    spare: int = 0

    def end(self, step: int, begun: int, ahead: int, complete: Callable[[int], bool]) -> int:
        """The steps before this one begin: all that may, where the trainer has to wait for `step`.

        Args:
            begun: the first step that has not begun
            complete: true if the groups of a step are all there
        """
        most = step + ahead + 1
        if not complete(step):
            self.spare = 0
            return most
        self.spare = self.spare + 1 if complete(step + 1) else 0
        fewer = self.spare == SPARE
        self.spare -= SPARE * fewer
        return min(most, begun + 1 - fewer)
