"""Epochs: the order in which a run goes through its records, a function of the place alone."""

from __future__ import annotations

import random
from functools import lru_cache


class Epochs:
    """An endless stream of the numbers 0 to ``size - 1``, each once an epoch.

    Epoch e is shuffled by (seed, e), and a number follows from its place in the stream: a resumed
    run needs no cursor.

    Args:
        size: at least 1
        seed: of the order
        shuffle: False: rising order
    """

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True):
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        # the order of an epoch serves all its steps; refills are in epochs far ahead
        self._order = lru_cache(4)(self._order_of)

    def take(self, first: int, n: int) -> list[int]:
        """The n numbers at places first to first + n - 1 of the stream."""
        places = [divmod(place, self.size) for place in range(first, first + n)]
        return [self._order(epoch)[offset] for epoch, offset in places]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
        return order
