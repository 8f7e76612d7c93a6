"""The images of a step by their numbers, and their split over replicas of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pyrl_ext.schedule.packing import least_work_first


class Images(NamedTuple):
    """I images of one kind by their numbers.

    Args:
        samples: [I] int64, sample of each image, ascending.
        rows:    [I] int64, first row of its placeholders in the sample.
        counts:  [I] int64, number of its rows in the language model.
        grids:   [I, 3] int64, its patches in time, height and width.
    """

    samples: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    grids: np.ndarray

    @classmethod
    def of(cls, table: np.ndarray) -> Images:
        """The images of `table`."""
        numbers = table.reshape(-1, 6).astype(np.int64)
        return cls(numbers[:, 0], numbers[:, 1], numbers[:, 2], numbers[:, 3:])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as `table`, in half as many bytes."""
        return Images.of, (self.table,)

    @property
    def table(self) -> np.ndarray:
        """[I, 6] int32, the numbers of an image in a row."""
        return np.column_stack([*self[:3], self.grids]).astype(np.int32)

    @property
    def patches(self) -> np.ndarray:
        """[I] int64, number of patches of each image."""
        return self.grids.prod(axis=1)

    def of_samples(self, samples: Sequence[int]) -> np.ndarray:
        """[J] the images of ``samples``, ascending."""
        return np.flatnonzero(np.isin(self.samples, np.asarray(samples, np.int64)))


def spread(sizes: np.ndarray, replicas: int) -> list[list[int]]:
    """The images of each replica: again and again the largest image to the one with least.

    Args:
        sizes: [J] patches of each image.

    Returns: [replicas] ascending places in ``sizes``; equal on every rank.
    """
    largest_first = np.argsort(-sizes, kind="stable").tolist()
    patches = sizes.tolist()
    parts = least_work_first(patches, patches, largest_first, replicas, sum(patches))
    assert parts is not None  # one part has room for all
    return [sorted(part) for part in parts]
