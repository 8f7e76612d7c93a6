"""The images of a step by their numbers, and which of them are encoded together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pyrl_ext.pack.schedule import Group, Microbatch, Schedule


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
    loads = [(0, replica) for replica in range(replicas)]
    found = [list[int]() for _ in range(replicas)]
    for image in np.argsort(-sizes, kind="stable").tolist():
        load, replica = loads[0]
        found[replica].append(image)
        heapq.heapreplace(loads, (load + int(sizes[image]), replica))
    return [sorted(images) for images in found]


# the limit of an encoder's microbatch ------------------------------------------------------------


def within_patches(
    schedule: Schedule, images: Images, replicas: int, limit: int, key: str
) -> Schedule:
    """``schedule`` with every microbatch split in which a replica would encode more patches.

    A sample stays on its ranks.

    Args:
        limit: most patches of a microbatch on one replica.
        key:   of the config that says so, for the message.

    Raises: ValueError when one sample alone is too much.
    """
    parts = [_split(each, images, replicas, limit, key) for each in schedule.microbatches]
    return replace(schedule, microbatches=tuple(part for some in parts for part in some))


def _split(
    groups: Microbatch, images: Images, replicas: int, limit: int, key: str
) -> tuple[Microbatch, ...]:
    """The microbatch in as few parts as `spread` finds to be small enough."""
    samples = np.asarray([i for group in groups for i in group.samples], np.int64)
    if not len(images.of_samples(samples.tolist())):
        return (groups,)
    weights = np.bincount(images.samples, weights=images.patches, minlength=samples.max() + 1)
    sizes = weights[samples].astype(np.int64)
    least = max(1, -(-int(sizes.sum()) // (replicas * limit)))
    for number in range(least, len(samples) + 1):
        parts = [samples[part] for part in spread(sizes, number)]
        if all(_fits(part, images, replicas, limit) for part in parts):
            return tuple(_only(groups, {*part.tolist()}) for part in parts)
    ids: list[int] = samples.tolist()
    worst = next(i for i in ids if not _fits(np.asarray([i]), images, replicas, limit))
    patches = images.patches[images.of_samples([worst])].tolist()
    raise ValueError(
        f"within_patches: sample {worst} has images of {patches} patches, expected at most "
        f"{key} {limit} on each of {replicas} replicas of the encoder. Raise it, or use fewer or "
        "smaller images"
    )


def _fits(samples: np.ndarray, images: Images, replicas: int, limit: int) -> bool:
    sizes = images.patches[images.of_samples(samples.tolist())]
    return all(sizes[part].sum() <= limit for part in spread(sizes, replicas))


def _only(groups: Microbatch, samples: set[int]) -> tuple[Group, ...]:
    """``groups`` with those of their samples alone that are in ``samples``."""
    return tuple(
        group._replace(samples=tuple(i for i in group.samples if i in samples)) for group in groups
    )
