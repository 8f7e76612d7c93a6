"""BatchShard: the rows that one rank computes in the microbatches of a step, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.pack.encoder_work import ShardImages
from pyrl_ext.pack.rank_rows import Lengths, RankRole, RankRows
from pyrl_ext.schedule import Schedule


class TeacherHead(NamedTuple):
    """The LM head of a teacher on a rank.

    Args:
        weight: [V_local, H_t] on the rank's device, the columns of the policy's shard.
        vocab_size: columns of all ranks that are no padding.
    """

    weight: Tensor
    vocab_size: int


@dataclass(frozen=True, eq=False)
class BatchShard:
    """The rows of one rank, microbatch after microbatch in local order, without padding.

    Args:
        schedule:    microbatches, minibatch after minibatch.
        minibatches: number of microbatches of each minibatch.
        lengths:     of all samples of the step.
        role:        of this rank.
        rows:        of this rank.
        stored:      name -> [N] of this rank's tokens: ``tokens``, ``targets_<d>`` int32 and
            ``loss_mask_<d>`` bool, where d is the depth of an MTP layer, 0 the next token; on the
            last stage ``rollout_logprobs``, ``advantages``, ``old_logprobs``, ``ref_logprobs``,
            ``teacher_logprobs`` float32, ``teacher_hidden`` [N, H_t]. ``routes`` [R, l, K] of the
            role's layers and ``route_mask`` [R] describe the routers' rows. All are on the host;
            rows that `wait` was not called for may be on their way.
        layer_ids:   ids of all layers that the samples have routes of.
        loss_tokens: [minibatches][1 + D] loss tokens of all ranks by depth.
        images:      by the encoder's name.
        wait_for:    returns once the rows of a microbatch of the step are there.
        kept_of:     returns the kept sets of the rows of a microbatch of the step, which are there;
            None: log-probs are of all of the vocabulary, or this is not the last stage.
        first:       number in the step of the first microbatch.
        teacher_head: for ``teacher_hidden``; None: no distributions are compared.
    """

    schedule: Schedule
    minibatches: tuple[int, ...]
    lengths: Lengths
    role: RankRole
    rows: RankRows
    stored: Mapping[str, Tensor]
    layer_ids: tuple[int, ...]
    loss_tokens: tuple[tuple[int, ...], ...]
    images: Mapping[str, ShardImages] = field(default_factory=dict[str, ShardImages])
    wait_for: Callable[[int], None] = lambda microbatch: None
    kept_of: Callable[[int], KeptSets] | None = None
    first: int = 0
    teacher_head: TeacherHead | None = None

    def wait(self, microbatch: int) -> None:
        """Return once the rows of ``microbatch``, and of those before it, are there.

        Raises: RuntimeError naming the rank that did not send them.
        """
        self.wait_for(self.first + microbatch)

    def kept(self, microbatch: int) -> KeptSets | None:
        """The kept sets of the rows of ``microbatch``, which are there; None: there are none."""
        return None if self.kept_of is None else self.kept_of(self.first + microbatch)

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """`stored`, once all its rows are there."""
        self.wait(len(self.schedule) - 1)
        return self.stored

    def minibatch(self, number: int) -> BatchShard:
        """The part of one minibatch; its columns are views."""
        first = sum(self.minibatches[:number])
        last = first + self.minibatches[number]
        first_tokens = self.rows.first_token[first : last + 1]
        first_routers = self.rows.first_router[first : last + 1]
        tokens = slice(first_tokens[0], first_tokens[-1])
        routers = slice(first_routers[0], first_routers[-1])
        return replace(
            self,
            schedule=replace(self.schedule, microbatches=self.schedule.microbatches[first:last]),
            minibatches=(self.minibatches[number],),
            rows=RankRows(
                self.rows.tokens[tokens],
                self.rows.routers[routers],
                first_tokens - first_tokens[0],
                first_routers - first_routers[0],
            ),
            stored={
                name: column[routers if name.startswith("route") else tokens]
                for name, column in self.stored.items()
            },
            loss_tokens=(self.loss_tokens[number],),
            images={name: images.between(first, last) for name, images in self.images.items()},
            first=self.first + first,
        )

    def with_columns(self, **columns: Tensor) -> BatchShard:
        """With more columns on the host, named as in ``stored``."""
        return replace(self, stored={**self.stored, **columns})

    def with_routes(
        self, layer_ids: tuple[int, ...], layers: tuple[int, ...], routes: Tensor | None
    ) -> BatchShard:
        """With these routes instead of those that came with the samples.

        Args:
            layer_ids: of all layers of the model that have routes.
            layers: 0-based global ids of this rank's layers that replay, ascending.
            routes: [R, l, K] on the host, of the routers' rows; None without layers.
        """
        stored = {name: x for name, x in self.stored.items() if not name.startswith("route")}
        if routes is not None:
            mask = torch.ones(len(routes), dtype=torch.bool)
            stored |= {"routes": routes, "route_mask": mask}
        role = self.role._replace(layers=layers)
        return replace(self, stored=stored, role=role, layer_ids=layer_ids)


def joined(schedules: Sequence[Schedule]) -> Schedule:
    """The microbatches of all ``schedules``, one after the other."""
    return replace(
        schedules[0],
        microbatches=tuple(m for schedule in schedules for m in schedule.microbatches),
        makespan=sum(schedule.makespan for schedule in schedules),
        lower_bound=sum(schedule.lower_bound for schedule in schedules),
    )
