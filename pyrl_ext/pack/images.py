"""Images of a step: which replica of an encoder encodes which, and which row of which rank's shard
each row of its output goes to. All of it follows from numbers that every rank has."""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.pack.schedule import Group, Microbatch, Schedule
from pyrl_ext.pack.shard import Lengths, Seat, layout_of


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

    @property
    def patches(self) -> np.ndarray:
        """[I] int64, number of patches of each image."""
        return self.grids.prod(axis=1)

    def of_samples(self, samples: Sequence[int]) -> np.ndarray:
        """[J] the images of ``samples``, ascending."""
        return np.flatnonzero(np.isin(self.samples, np.asarray(samples, np.int64)))


class Route(NamedTuple):
    """Rows that a replica of an encoder sends to one rank.

    Args:
        source: [n] int64 on the host, rows of the replica's output.
        dest:   [n] int64 on the host, rows of the rank's shard that they belong to, ascending.
    """

    source: Tensor
    dest: Tensor


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


@dataclass(frozen=True, eq=False)
class EncoderWork:
    """Who encodes which image in which microbatch, and where the rows go.

    An encoder's microbatches are those of the schedule of its reader.

    Args:
        schedule: of the reader.
        lengths:  of all samples of the step.
        replicas: data-parallel ranks of the encoder.
    """

    images: Images
    schedule: Schedule
    lengths: Lengths
    replicas: int
    _spread: dict[int, list[np.ndarray]] = field(
        default_factory=dict[int, list[np.ndarray]], init=False, repr=False
    )

    def ids(self, microbatch: int, replica: int) -> np.ndarray:
        """[J] the images that ``replica`` encodes, in the order of its output."""
        if microbatch not in self._spread:
            samples = [i for group in self.schedule.microbatches[microbatch] for i in group.samples]
            ids = self.images.of_samples(samples)
            parts = spread(self.images.patches[ids], self.replicas)
            self._spread[microbatch] = [ids[part] for part in parts]
        return self._spread[microbatch][replica]

    def rows(self, microbatch: int, replica: int) -> np.ndarray:
        """[F] row of the step's stream in each row of the output of ``replica``."""
        ids = self.ids(microbatch, replica)
        counts = self.images.counts[ids]
        firsts = self.lengths.starts[self.images.samples[ids]] + self.images.rows[ids]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(firsts, counts) + within

    def route(self, microbatch: int, replica: int, seat: Seat) -> Route:
        """The rows of ``replica`` that the first stage of ``seat`` embeds: its part of the sequence
        under context and sequence parallelism."""
        group = self.schedule.group_of(microbatch, seat.grid_rank)
        samples = self.images.samples[self.ids(microbatch, replica)]
        if not len(group.samples) or not np.isin(samples, group.samples).any():
            return meeting(np.empty(0, np.int64), np.empty(0, np.int64))
        layout = layout_of(group, self.lengths, seat)
        local = layout.shard(layout.rows(seat.grid_rank - group.first), seat.tp_rank)
        return meeting(self.rows(microbatch, replica), local.numpy())


def meeting(output: np.ndarray, local: np.ndarray) -> Route:
    """Which rows of an output are among the rows of a shard.

    Args:
        output: [F] rows of the stream, each once.
        local:  [M] rows of the stream, -1 in padding.
    """
    if not len(output):
        return Route(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    order = np.argsort(output)
    places = np.searchsorted(output, local, sorter=order).clip(max=len(output) - 1)
    source = order[places]
    dest = np.flatnonzero(output[source] == local)
    return Route(torch.from_numpy(source[dest]), torch.from_numpy(dest))


@dataclass(frozen=True, eq=False)
class ShardImages:
    """The images of one encoder in a shard.

    Args:
        work:    of the shard's microbatches.
        patches: [P, C] on the host, those that this rank's replica encodes, microbatch after
            microbatch; None but on the encoder's first stage.
        firsts:  [microbatches + 1] where each microbatch begins in ``patches``.
        merge:   an image has ``merge`` x ``merge`` patches for each of its rows.
    """

    work: EncoderWork
    patches: Tensor | None
    firsts: np.ndarray
    merge: int

    def between(self, first: int, last: int) -> ShardImages:
        """The part of microbatches ``first`` to ``last``."""
        schedule = self.work.schedule
        part = replace(schedule, microbatches=schedule.microbatches[first:last])
        firsts = self.firsts[first : last + 1]
        patches = None if self.patches is None else self.patches[firsts[0] : firsts[-1]]
        return replace(
            self,
            work=replace(self.work, schedule=part),
            patches=patches,
            firsts=firsts - firsts[0],
        )

    def microbatch(
        self, number: int, replica: int
    ) -> tuple[Tensor | None, list[tuple[int, ...]], int]:
        """(patches [p, C], grid of each image, rows of the output) that ``replica`` encodes.

        Without images there is one made of zeros, whose rows are not counted: attention takes no
        empty input, and every pipeline stage needs a graph to send a gradient back through.
        """
        first, last = self.firsts[number : number + 2]
        patches = None if self.patches is None else self.patches[first:last]
        grids = self.work.images.grids[self.work.ids(number, replica)].tolist()
        if grids:
            return patches, list(map(tuple, grids)), len(self.work.rows(number, replica))
        if patches is not None:
            patches = patches.new_zeros(self.merge**2, patches.shape[1])
        return patches, [(1, self.merge, self.merge)], 0


# the limit of an encoder's microbatch ------------------------------------------------------------


def within_patches(schedule: Schedule, images: Images, replicas: int, limit: int) -> Schedule:
    """``schedule`` with every microbatch split in which a replica would encode more patches.

    A sample stays on its ranks.

    Args:
        limit: most patches of a microbatch on one replica.

    Raises: ValueError when one sample alone is too much.
    """
    parts = (_split(each, images, replicas, limit) for each in schedule.microbatches)
    return replace(schedule, microbatches=tuple(part for some in parts for part in some))


def _split(groups: Microbatch, images: Images, replicas: int, limit: int) -> tuple[Microbatch, ...]:
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
        f"within_patches: sample {worst} has images of {patches} patches, expected at most {limit} "
        f"on each of {replicas} replicas (patches_per_microbatch)"
    )


def _fits(samples: np.ndarray, images: Images, replicas: int, limit: int) -> bool:
    sizes = images.patches[images.of_samples(samples.tolist())]
    return all(sizes[part].sum() <= limit for part in spread(sizes, replicas))


def _only(groups: Microbatch, samples: set[int]) -> tuple[Group, ...]:
    """``groups`` with those of their samples alone that are in ``samples``."""
    return tuple(
        group._replace(samples=tuple(i for i in group.samples if i in samples)) for group in groups
    )
