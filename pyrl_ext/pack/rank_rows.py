"""The rows of a step's ragged stream that one rank computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.schedule import Group, Schedule
from pyrl_ext.schedule.alignment import alignment


class RankRole(NamedTuple):
    """The part of a step that one rank computes.

    Args:
        grid_rank: in the grid of data- and context-parallel ranks, in which schedules count; -1: it
            computes no rows.
        tp_rank, tp_size: tensor-parallel ranks; the routers of each see a part of the rows.
        last_stage: True if the rank computes losses.
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


def layout_of(group: Group, lengths: Lengths, role: RankRole) -> TokenLayout:
    """The layout of a group's samples over its ranks; one row of padding without samples."""
    return TokenLayout(
        tuple(int(lengths.seqlens[i]) for i in group.samples) or (1,),
        cp_size=group.cp_size,
        tp_size=role.tp_size,
        align=alignment(role.tp_size, group.cp_size, role.tile_rows),
        starts=tuple(int(lengths.starts[i]) for i in group.samples) or (-1,),
    )


class RankRows(NamedTuple):
    """The rows of a rank in the stream of all samples, microbatch after microbatch.

    Args:
        tokens:  [N] int64, rows that the rank computes.
        routers: [R] int64, those that its routers see.
        first_token, first_router: [microbatches + 1] where each microbatch begins in them.
    """

    tokens: np.ndarray
    routers: np.ndarray
    first_token: np.ndarray
    first_router: np.ndarray

    @classmethod
    def of(
        cls, schedule: Schedule, lengths: Lengths, role: RankRole, owned: np.ndarray | None = None
    ) -> RankRows:
        """The rows that a rank of ``role`` computes.

        Args:
            owned: [S] bool, the samples whose rows count; None: all of them.
        """
        empty = np.empty(0, np.int64)
        tokens = [empty]
        routers = [empty]
        if role.grid_rank < 0:
            firsts = np.zeros(len(schedule) + 1, np.int64)
            return cls(empty, empty, firsts, firsts)
        for number in range(len(schedule)):
            group = schedule.group_of(number, role.grid_rank)
            if owned is not None and not owned[list(group.samples)].any():
                tokens.append(empty)
                routers.append(empty)
                continue
            layout = layout_of(group, lengths, role)
            local = layout.rows(role.grid_rank - group.first)
            tokens.append(_real_rows(local, lengths, owned))
            routers.append(_real_rows(layout.shard(local, role.tp_rank), lengths, owned))
        return cls(
            np.concatenate(tokens),
            np.concatenate(routers),
            first_token=np.cumsum([len(rows) for rows in tokens]),
            first_router=np.cumsum([len(rows) for rows in routers]),
        )


def _real_rows(rows: Tensor, lengths: Lengths, owned: np.ndarray | None) -> np.ndarray:
    """The rows that are not padding, of the samples that are ``owned``."""
    real = rows[rows >= 0].numpy()
    return real if owned is None else real[owned[lengths.sample_of(real)]]
