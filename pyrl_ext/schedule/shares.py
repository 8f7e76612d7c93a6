"""Shares: which of several sources each place of an endless stream belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction


class Shares:
    """Divides the places 0, 1, 2, ... of a stream among sources by weight.

    Number c of source s is due at (c + 1/2) / weight of s, and places go to numbers in the order in
    which they are due. So over any first places, sources have about their shares, a source never
    gives a place back, and both follow from the place alone: a resumed run needs no cursor.

    Args:
        weights: by source, above 0

    Source: the divisor method of Webster and Sainte-Laguë for the apportionment of seats.
    """

    def __init__(self, weights: Mapping[str, float]):
        self.weights = {name: Fraction(str(weight)) for name, weight in weights.items()}

    def before(self, place: int) -> dict[str, int]:
        """Number of places before ``place`` that belong to each source."""
        early = Fraction(place) - Fraction(len(self.weights), 2)  # at most ``place`` are due then
        time = max(Fraction(0), early / sum(self.weights.values()))
        counts = {
            name: int(time * weight + Fraction(1, 2)) for name, weight in self.weights.items()
        }
        for _ in range(place - sum(counts.values())):
            counts[self._next(counts)] += 1
        return counts

    def owners(self, place: int, n: int) -> list[str]:
        """The source of each of ``n`` places from ``place`` on."""
        counts = self.before(place)
        found: list[str] = []
        for _ in range(n):
            name = self._next(counts)
            counts[name] += 1
            found.append(name)
        return found

    def _next(self, counts: Mapping[str, int]) -> str:
        """The source whose next number is due first; of several, the first one."""
        due = {name: (2 * counts[name] + 1) / weight for name, weight in self.weights.items()}
        return min(due, key=lambda name: due[name])
