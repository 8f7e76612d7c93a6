"""Epochs: the order in which a run goes through its records, a function of the step's number."""

from __future__ import annotations

import random


class Epochs:
    """An endless stream of the numbers 0 to ``size - 1``, each once an epoch.

    Epoch e is shuffled by (seed, e), and the place of a step in the stream follows from its number:
    a resumed run needs no cursor.

    Args:
        size: at least 1
        seed: of the order
        shuffle: False: rising order
    """

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True):
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._orders: dict[int, list[int]] = {}

    def take(self, step: int, n: int) -> list[int]:
        """The n numbers of a step, at places step * n to (step + 1) * n - 1 of the stream."""
        places = [divmod(place, self.size) for place in range(step * n, (step + 1) * n)]
        epochs = {epoch for epoch, _ in places}
        # the order of an epoch serves all its steps
        self._orders = {e: self._orders.get(e) or self._order(e) for e in epochs}
        return [self._orders[epoch][offset] for epoch, offset in places]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
        return order
