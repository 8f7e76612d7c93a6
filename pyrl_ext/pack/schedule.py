"""Scheduler: the samples and ranks of every microbatch of a plan.

The plan's forecast packs with `schedule/packing.py`; the trainer takes that plan or a faster one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from pyrl_ext.pack.images import Images, spread
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.plan import Plan
from pyrl_ext.plan.cp_groups import costs_of, cp_groups
from pyrl_ext.schedule.cp_problem import CostModel, CpGroups
from pyrl_ext.schedule.microbatches import plan_dynamic_cp, plan_microbatches
from pyrl_ext.schedule.schedule import Microbatch, Schedule


class Scheduler:
    """Which samples of a plan's minibatches run together, in which microbatch, on which ranks.

    Groups and microbatches are priced once.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def _groups(self) -> CpGroups:
        return cp_groups(self.plan)

    @cached_property
    def _cost(self) -> CostModel:
        # all groups have one size: what they exchange does not depend on the schedule
        return replace(costs_of(self.plan), exchanges=())

    def schedule(self, seqlens: Sequence[int]) -> Schedule:
        """The microbatches of samples of ``seqlens`` rows, as ``parallel.dynamic_cp`` says."""
        return self._padded(self._placed(seqlens))

    def _placed(self, seqlens: Sequence[int]) -> Schedule:
        parallel = self.plan.parallel
        if parallel.dynamic_cp is not None:
            return plan_dynamic_cp(seqlens, self._groups)
        return plan_microbatches(
            seqlens,
            parallel.dp,
            self.plan.batching.tokens_per_microbatch,
            self.plan.row_alignment,
            parallel.cp,
            self._cost,
        )

    def _padded(self, schedule: Schedule) -> Schedule:
        # an interleaved pipeline runs pp microbatches of a chunk at a time
        return schedule.padded(self.plan.parallel.pp if self.plan.parallel.vpp else 1)

    def _encoded(self, schedule: Schedule, images: Images) -> Schedule:
        """With microbatches whose images the encoder's replicas take in one pass each."""
        if not len(images.samples):
            return schedule
        for name, module in self.plan.modules.items():
            replicas = self.plan.grids[name].parallel.dp
            limit = module.patches_per_microbatch
            key = f"modules.{name}.patches_per_microbatch"
            schedule = within_patches(schedule, images, replicas, limit, key)
        return schedule

    def minibatches(self, index: BatchIndex, number: int | None = None) -> list[Schedule]:
        """The schedule of every minibatch; `number` of them, None: as many as the plan has.

        Scores and updates follow the same schedules, so that a row is computed on one rank in all
        passes, and its first old and current log-probs are the same number. Images are encoded
        in the microbatches of their samples.

        Raises: ValueError when a sample fits nowhere; with the minibatch that counts it.
        """
        parts = index.split(number or self.plan.batching.minibatches)
        found: list[Schedule] = []
        for i, ids in enumerate(parts):
            try:
                placed = self._placed(index.seqlens[ids].tolist()).renumbered(ids)
                found.append(self._padded(self._encoded(placed, index.images)))
            except ValueError as error:
                raise ValueError(f"minibatch {i} of {len(parts)}: {error}") from None
        return found


# Limit of an encoder's microbatch ----------------------------------------------------------------


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


def _only(groups: Microbatch, samples: set[int]) -> Microbatch:
    """``groups`` with only those of their samples that are in ``samples``."""
    return tuple(
        group._replace(samples=tuple(i for i in group.samples if i in samples)) for group in groups
    )
