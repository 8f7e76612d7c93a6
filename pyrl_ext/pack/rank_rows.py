"""The rows of a step's ragged stream that one rank computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.pack.schedule import Group, Schedule
from pyrl_ext.schedule.alignment import alignment


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
        tokens = [np.empty(0, np.int64)]
        routers = [np.empty(0, np.int64)]
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
