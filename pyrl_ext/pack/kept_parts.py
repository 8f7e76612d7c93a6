"""KeptParts: the kept sets of the rows that come to a rank, part after part."""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import numpy as np
import torch

from pyrl_ext.loss.sampling_mask import KeptSets


class KeptParts:
    """Kept sets of rows that come in parts, of several owners each.

    Args:
        cuts: [P + 1] first row of each part, then their number.
    """

    def __init__(self, cuts: np.ndarray):
        self._cuts = cuts
        self._pieces: list[list[tuple[np.ndarray, KeptSets]]] = [[] for _ in cuts[1:]]
        self._whole: dict[int, KeptSets] = {}

    def add(self, part: int, places: np.ndarray, sets: KeptSets | None) -> None:
        """Add the sets of the rows at ``places`` [M], which are in ``part``."""
        if sets is not None:
            self._pieces[part].append((places, sets))

    def rows(self, part: int, first: int, end: int) -> KeptSets:
        """The sets of rows ``[first, end)``, in a part that is complete."""
        if part not in self._whole:
            pieces, self._pieces[part] = self._pieces[part], []
            places = np.concatenate([np.empty(0, np.int64), *(at for at, _ in pieces)])
            joined = KeptSets.joined([sets for _, sets in pieces])
            self._whole[part] = joined.select(torch.from_numpy(np.argsort(places)))
        begin = int(self._cuts[part])
        return self._whole[part].select(torch.arange(first - begin, end - begin))
