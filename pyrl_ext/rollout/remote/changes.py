"""The 16-bit words of a bucket that changed since the weight sync before.

A step of RL is small: most bfloat16 weights keep their bits (`rollout.delta_sync`). Changes are the
distance of each changed word from the one before, then their new values. The last word of each
`RUN` is always sent, so that 16 bits hold every distance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.ops._native import C

RUN = 2**15  # words that are compared at a time: they stay in a processor's caches
WORD = np.dtype("<u2")
CHANGE_BYTES = 2 * WORD.itemsize
APPLIED = 2**20  # changes that are applied at a time

Words = np.ndarray[Any, np.dtype[np.uint16]]


def changes_between(old: Tensor, new: Tensor) -> Tensor | None:
    """The changes from one version of some bytes to another.

    Args:
        old, new: [n] uint8 on the CPU, n even

    Returns: [m] uint8, m < n; None if the changes are not smaller than ``new``.
    """
    most = (new.numel() - 1) // CHANGE_BYTES
    if most <= 0:
        return None
    find = changed_words if C is None else changed_words_native
    found = find(_words(old), _words(new), most)
    return None if found is None else torch.from_numpy(np.concatenate(found)).view(torch.uint8)


def changed_words(before: Words, after: Words, most: int) -> tuple[Words, Words] | None:
    """Distances and values of the words that are sent; None: there are more than ``most``."""
    distances: list[Words] = []
    values: list[Words] = []
    count = 0
    for start in range(0, len(after), RUN):
        old = before[start : start + RUN]
        new = after[start : start + RUN]
        differs = old != new
        differs[-1] = True
        places = np.flatnonzero(differs)
        count += len(places)
        if count > most:
            return None
        distances.append(np.diff(places, prepend=-1).astype(WORD))
        values.append(new[places])
    return np.concatenate(distances), np.concatenate(values)


def changed_words_native(before: Words, after: Words, most: int) -> tuple[Words, Words] | None:
    """`changed_words`, from the extension."""
    distances = np.empty(most + C.WORDS_AT_ONCE, WORD)
    values = np.empty(most + C.WORDS_AT_ONCE, WORD)
    count = C.changed_words_cpu(
        before=before.ctypes.data,
        now=after.ctypes.data,
        size=len(after),
        run=RUN,
        distances=distances.ctypes.data,
        values=values.ctypes.data,
        room=most,
    )
    return None if count < 0 else (distances[:count], values[:count])


def apply_changes(data: Tensor, changes: Tensor) -> bool:
    """Turn the old bytes into the new ones, in place.

    Args:
        data: [n] uint8 on the CPU, n even
        changes: as `changes_between` returns them, [m] uint8, m divisible by 4

    Returns: False if they lie outside ``data`` or are out of order; it is partly changed then.
    """
    words = _words(data)
    distances, values = _words(changes).reshape(2, -1)
    last = -1
    for start in range(0, len(values), APPLIED):
        part = distances[start : start + APPLIED]
        if not part.all():
            return False
        places = np.cumsum(part, dtype=np.int64) + last
        last = int(places[-1])
        if last >= len(words):
            return False
        words[places] = values[start : start + APPLIED]
    return True


def _words(data: Tensor) -> Words:
    return data.numpy().view(WORD)


class Changes(NamedTuple):
    """The changes of one bucket since the weight sync before.

    Args:
        base: digest of the bucket before
        data: see `changes_between`
    """

    base: str
    data: Tensor


class _Sent(NamedTuple):
    digest: str
    data: Tensor


@dataclass
class SentBuckets:
    """A copy in host memory of the buckets that a rank sent last.

    Attributes:
        sync: number of the weight sync that sent them; "": there was none, or it failed
    """

    sync: str = ""
    _sent: list[_Sent] = field(default_factory=list[_Sent])

    def changes(self, place: int, data: Tensor) -> Changes | None:
        """The changes from the kept copy of bucket ``place`` to ``data``.

        Returns: None if all of ``data`` has to be sent: no copy of this size is kept, or the
            changes are not smaller.
        """
        if place >= len(self._sent) or self._sent[place].data.shape != data.shape:
            return None
        before = self._sent[place]
        found = changes_between(before.data, data)
        return None if found is None else Changes(before.digest, found)

    def keep(self, place: int, data: Tensor, digest: str) -> None:
        """Keep a copy of a bucket that is sent now, in place of the one before.

        Args:
            place: of the bucket among those of this rank; they come in order
        """
        before = self._sent[place : place + 1]
        if before and before[0].data.shape == data.shape:
            memory = before[0].data.copy_(data)
        else:
            memory = data.clone()
        self._sent[place : place + 1] = [_Sent(digest, memory)]

    def end(self, count: int) -> None:
        """Forget buckets from ``count`` on, of a sync that had more."""
        del self._sent[count:]
