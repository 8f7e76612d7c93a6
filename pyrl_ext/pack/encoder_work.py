"""An encoder's part of a step: which replica encodes which image, and which row of which rank's
shard each row of its output goes to. All of it follows from numbers that every rank has."""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.pack.images import Images, spread
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.pack.needs import Field, Items, NeededRows
from pyrl_ext.pack.rank_rows import Lengths, RankRole, layout_of
from pyrl_ext.plan import Plan
from pyrl_ext.schedule import Schedule


class Route(NamedTuple):
    """Rows that a replica of an encoder sends to one rank.

    Args:
        source: [n] int64 on the host, rows of the replica's output.
        dest:   [n] int64 on the host, rows of the rank's shard that they belong to, ascending.
    """

    source: Tensor
    dest: Tensor


def _runs(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The numbers of runs of such sizes, which begin with ``firsts``, one run after the other."""
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(firsts, sizes) + within


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

    @cached_property
    def _spread(self) -> list[list[np.ndarray]]:
        """[microbatches][replicas] the images that each encodes."""
        found: list[list[np.ndarray]] = []
        for groups in self.schedule.microbatches:
            ids = self.images.of_samples([i for group in groups for i in group.samples])
            found.append([ids[part] for part in spread(self.images.patches[ids], self.replicas)])
        return found

    def ids(self, microbatch: int, replica: int) -> np.ndarray:
        """[J] the images that ``replica`` encodes, in the order of its output."""
        return self._spread[microbatch][replica]

    def rows(self, microbatch: int, replica: int, depth: int = 0) -> np.ndarray:
        """[F] row of the step's stream that embeds each row of the output of ``replica``.

        Args:
            depth: of the MTP layer that embeds it, as many rows earlier; -2 where the sample begins
                later. 0: the first stage.
        """
        ids = self.ids(microbatch, replica)
        counts = self.images.counts[ids]
        within = self.images.rows[ids] - depth
        rows = _runs(self.lengths.starts[self.images.samples[ids]] + within, counts)
        return np.where(_runs(within, counts) < 0, -2, rows) if depth else rows

    def route(self, microbatch: int, replica: int, role: RankRole, depth: int = 0) -> Route:
        """The rows of ``replica`` that ``role`` embeds, in its part of the sequence under context
        and sequence parallelism.

        Args:
            depth: as in `rows`.
        """
        group = self.schedule.group_of(microbatch, role.grid_rank)
        samples = self.images.samples[self.ids(microbatch, replica)]
        if not len(group.samples) or not np.isin(samples, group.samples).any():
            return meeting(np.empty(0, np.int64), np.empty(0, np.int64))
        layout = layout_of(group, self.lengths, role)
        local = layout.shard(layout.rows(role.grid_rank - group.first), role.tp_rank)
        return meeting(self.rows(microbatch, replica, depth), local.numpy())


def meeting(output: np.ndarray, local: np.ndarray) -> Route:
    """Which rows of an output are among the rows of a shard.

    Args:
        output: [F] rows of the stream, each once; -2: none.
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


@dataclass(frozen=True, eq=False)
class PatchStream:
    """The patches of a step in one ragged stream, image after image.

    Args:
        name:   of the encoder that reads them.
        work:   of all microbatches of the step.
        owners: [I] int32, rank that holds each image: the owner of its sample.
        width:  numbers of a patch.
        merge:  see `ShardImages`.
    """

    name: str
    work: EncoderWork
    owners: np.ndarray
    width: int
    merge: int

    @classmethod
    def of(cls, plan: Plan, index: BatchIndex, schedule: Schedule) -> PatchStream | None:
        """The patches that the plan's encoder reads; None: it has none."""
        tower = plan.sizes.vision
        encoders = [grid for grid in plan.grids.values() if grid.name != "llm"]
        if tower is None or not encoders:
            return None
        (grid,) = encoders
        lengths = Lengths(index.seqlens, index.starts)
        work = EncoderWork(index.images, schedule, lengths, grid.parallel.dp)
        owners = index.owners[index.images.samples]
        return cls(grid.name, work, owners, tower.patch_width, tower.merge)

    @cached_property
    def items(self) -> Items:
        """Images as runs of patches."""
        sizes = self.work.images.patches
        return Items(Lengths(sizes, np.concatenate([[0], np.cumsum(sizes)])), self.owners)

    @property
    def fields(self) -> dict[str, Field]:
        """The one column."""
        return {"patches": Field("images", torch.uint8, (self.width,))}

    def need(self, replica: int, parts: np.ndarray, owner: int | None = None) -> NeededRows:
        """The patches that ``replica`` encodes, microbatch after microbatch.

        Args:
            parts: [P + 1] first microbatch of each part, then their number.
            owner: only of its images; None: of all.
        """
        ids = self._ids(replica)
        if owner is not None:
            ids = [images[self.owners[images] == owner] for images in ids]
        sizes, starts = self.items.lengths
        rows = _runs(starts[np.concatenate(ids)], sizes[np.concatenate(ids)])
        return NeededRows(self.items, rows, self._firsts(ids)[parts], self.fields)

    def images(self, replica: int, columns: Mapping[str, Tensor]) -> ShardImages:
        """The images of a shard; ``columns`` hold the patches of ``replica``."""
        firsts = self._firsts(self._ids(replica) if replica >= 0 else [])
        return ShardImages(self.work, columns.get("patches"), firsts, self.merge)

    def _ids(self, replica: int) -> list[np.ndarray]:
        """The images that ``replica`` encodes in each microbatch."""
        return [self.work.ids(number, replica) for number in range(len(self.work.schedule))]

    def _firsts(self, ids: Sequence[np.ndarray]) -> np.ndarray:
        """[microbatches + 1] first patch of each microbatch, then their number."""
        sizes = self.items.lengths.seqlens
        firsts = np.zeros(len(self.work.schedule) + 1, np.int64)
        firsts[1 : len(ids) + 1] = np.cumsum([int(sizes[images].sum()) for images in ids])
        return firsts
