"""BatchShard: the rows that one rank computes in the microbatches of a step, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.pack.schedule import Group, Schedule
from pyrl_ext.schedule.alignment import alignment

if TYPE_CHECKING:
    from pyrl_ext.loss.kept_sets import KeptSets
    from pyrl_ext.pack.encoder_work import ShardImages


class Seat(NamedTuple):
    """The part of a step that a rank computes.

    Args:
        grid_rank: in the grid of data- and context-parallel ranks, in which schedules count; -1: it
            computes no rows.
        tp_rank, tp_size: tensor-parallel ranks; the routers of each see a part of the rows.
        last_stage: whether the rank computes losses.
        layers: 0-based global ids of its layers whose routers replay, ascending.
        tile_rows: rows of a tensor-parallel rank are a multiple of this (FP8).
        replica: of an encoder whose first stage the rank holds; -1: it takes no patches.
    """

    grid_rank: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    last_stage: bool = True
    layers: tuple[int, ...] = ()
    tile_rows: int = 1
    replica: int = -1


class Lengths(NamedTuple):
    """The samples of a step as runs of rows in one ragged stream.

    Args:
        seqlens: [S] rows of each sample.
        starts:  [S + 1] int64, first row of each sample, then T.
    """

    seqlens: np.ndarray
    starts: np.ndarray

    def sample_of(self, rows: np.ndarray) -> np.ndarray:
        """[M] sample of each row."""
        return np.searchsorted(self.starts, rows, side="right") - 1


def layout_of(group: Group, lengths: Lengths, seat: Seat) -> TokenLayout:
    """The layout of a group's samples over its ranks; one row of padding without samples."""
    return TokenLayout(
        tuple(int(lengths.seqlens[i]) for i in group.samples) or (1,),
        cp_size=group.cp_size,
        tp_size=seat.tp_size,
        align=alignment(seat.tp_size, group.cp_size, seat.tile_rows),
        starts=tuple(int(lengths.starts[i]) for i in group.samples) or (-1,),
    )


class SeatRows(NamedTuple):
    """The rows of a seat in the stream of all samples, microbatch after microbatch.

    Args:
        tokens:  [N] int64, rows that the seat computes.
        routers: [R] int64, those that its routers see.
        first_token, first_router: [microbatches + 1] where each microbatch begins in them.
    """

    tokens: np.ndarray
    routers: np.ndarray
    first_token: np.ndarray
    first_router: np.ndarray

    @classmethod
    def of(
        cls, schedule: Schedule, lengths: Lengths, seat: Seat, owned: np.ndarray | None = None
    ) -> SeatRows:
        """The rows that ``seat`` computes.

        Args:
            owned: [S] bool, the samples whose rows count; None: all of them.
        """
        tokens, routers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        if seat.grid_rank < 0:
            firsts = np.zeros(len(schedule) + 1, np.int64)
            return cls(tokens[0], routers[0], firsts, firsts)
        for number in range(len(schedule)):
            group = schedule.group_of(number, seat.grid_rank)
            if owned is not None and not owned[list(group.samples)].any():
                tokens.append(tokens[0])
                routers.append(routers[0])
                continue
            layout = layout_of(group, lengths, seat)
            local = layout.rows(seat.grid_rank - group.first)
            for found, rows in ((tokens, local), (routers, layout.shard(local, seat.tp_rank))):
                real = rows[rows >= 0].numpy()
                if owned is not None:
                    real = real[owned[lengths.sample_of(real)]]
                found.append(real)
        firsts = (np.cumsum([len(part) for part in parts]) for parts in (tokens, routers))
        return cls(np.concatenate(tokens), np.concatenate(routers), *firsts)


@dataclass(frozen=True, eq=False)
class BatchShard:
    """The rows of one rank, microbatch after microbatch in local order, without padding.

    Args:
        schedule:    microbatches, minibatch after minibatch.
        minibatches: number of microbatches of each minibatch.
        lengths:     of all samples of the step.
        seat:        of this rank.
        rows:        of this rank.
        stored:      name -> [N] of this rank's tokens: ``tokens``, ``targets_<d>`` int32 and
            ``loss_mask_<d>`` bool, where d is the depth of an MTP layer, 0 the next token; on the
            last stage ``rollout_logprobs``, ``advantages``, ``old_logprobs``, ``ref_logprobs``
            float32. ``routes`` [R, l, K] of the seat's layers, ``route_mask`` [R] and, in runs
            ahead, ``route_ages`` [R, A] describe the routers' rows. All are on the host; rows that
            `wait` was not called for may be on their way.
        layer_ids:   ids of all layers that the samples have routes of.
        loss_tokens: [minibatches][1 + D] loss tokens of all ranks by depth.
        images:      by the encoder's name.
        wait_for:    returns once the rows of a microbatch of the step are there.
        kept_of:     returns the kept sets of the rows of a microbatch of the step, which are there;
            None: log-probs are of all of the vocabulary, or this is not the last stage.
        first:       number in the step of the first microbatch.
    """

    schedule: Schedule
    minibatches: tuple[int, ...]
    lengths: Lengths
    seat: Seat
    rows: SeatRows
    stored: Mapping[str, Tensor]
    layer_ids: tuple[int, ...]
    loss_tokens: tuple[tuple[int, ...], ...]
    images: Mapping[str, ShardImages] = field(default_factory=dict[str, "ShardImages"])
    wait_for: Callable[[int], None] = lambda microbatch: None
    kept_of: Callable[[int], KeptSets] | None = None
    first: int = 0

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
        cuts = [(n[first], n[last]) for n in (self.rows.first_token, self.rows.first_router)]
        (token, end), (router, router_end) = cuts
        return replace(
            self,
            schedule=replace(self.schedule, microbatches=self.schedule.microbatches[first:last]),
            minibatches=(self.minibatches[number],),
            rows=SeatRows(
                self.rows.tokens[token:end],
                self.rows.routers[router:router_end],
                self.rows.first_token[first : last + 1] - token,
                self.rows.first_router[first : last + 1] - router,
            ),
            stored={
                name: x[router:router_end] if name.startswith("route") else x[token:end]
                for name, x in self.stored.items()
            },
            loss_tokens=(self.loss_tokens[number],),
            images={name: each.between(first, last) for name, each in self.images.items()},
            first=self.first + first,
        )

    def with_columns(self, **columns: Tensor) -> BatchShard:
        """With more columns on the host, named as in ``stored``."""
        return replace(self, stored={**self.stored, **columns})


def joined(schedules: Sequence[Schedule]) -> Schedule:
    """The microbatches of all ``schedules``, one after the other."""
    return replace(
        schedules[0],
        microbatches=tuple(m for schedule in schedules for m in schedule.microbatches),
        makespan=sum(schedule.makespan for schedule in schedules),
        lower_bound=sum(schedule.lower_bound for schedule in schedules),
    )
