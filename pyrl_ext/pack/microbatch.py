"""Microbatch: the rows of some samples that one rank computes, in its order and on its device."""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.loss.inputs import LossInputs, Sequences
from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.ops import gather_fields
from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.pack.positions import axial_positions
from pyrl_ext.pack.rank_rows import layout_of
from pyrl_ext.pack.shard import BatchShard, TeacherHead
from pyrl_ext.parallel.topology import RankCoords
from pyrl_ext.parallel.upload import Upload

_SCORES = (
    "rollout_logprobs",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "weights",
    "corrections",
    "shares",
    "ages",
    "teacher_hidden",
)


class MTPInputs(NamedTuple):
    """Input and target of the MTP layer at one depth, [M] each.

    The layer at depth d reads token t + d with the hidden state of row t, and predicts token
    t + d + 1.

    Args:
        tokens:    int64, its input; 0 where the sample has ended.
        targets:   int64, the token to score; 0 where the sample has ended.
        loss_mask: bool, targets under the loss mask.
    """

    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Microbatch:
    """M = rows of this context-parallel rank, padding included.

    Args:
        place:     of this rank, for which the rows were chosen.
        layout:    where every row of the samples lies on every rank.
        rows:      [M] int64 on the host, row of the step's stream in each local row, -1 = padding.
        at:        [M] int64 on the host, its place among the tokens of the shard, -1 = padding.
        at_router: [M / tp_size] int64 on the host, place among the shard's routes of each row that
            this rank's routers see.
        tokens:    [M] int64, model input; padding holds 0.
        targets:   [M] int64, the token to score at each row; padding holds 0.
        positions: [M] int64, counting from 0 in each sample, or [3, M]: in time, height and width,
            where images are among the rows; padding holds 0.
        inputs:    [M] each, the inputs of the loss, zeros and a False mask in padding; None on a
            stage that computes no loss.
        mtp:       one entry an MTP layer.
        loss_rows: [1 + D] by depth, int64 on the host: the local rows of loss tokens.
        kept:      [M] sets that the next tokens were drawn from, in this rank's shard of the
            vocabulary; None: from all of it.
        teacher:   hidden states [M, H_t] and LM head of the teacher whose distributions the policy
            is compared with; None: there is none.
    """

    place: RankCoords
    layout: TokenLayout
    rows: Tensor
    at: Tensor
    at_router: Tensor
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    inputs: LossInputs | None
    mtp: tuple[MTPInputs, ...] = ()
    loss_rows: tuple[Tensor, ...] = ()
    kept: KeptSets | None = None
    teacher: tuple[Tensor, TeacherHead] | None = None

    @classmethod
    def of(
        cls,
        shard: BatchShard,
        number: int,
        place: RankCoords,
        depths: int = 0,
        upload: Upload | None = None,
        axes: bool = False,
    ) -> Microbatch:
        """Microbatch ``number`` of a shard.

        Without samples the microbatch is padding alone, so that the rank takes part in the
        collectives of the others.

        Args:
            place:  of the shard's rank in this microbatch.
            depths: MTP layers whose inputs are needed.
            upload: copies the rows to its device; the current stream waits for it. None: they stay
                on the host.
            axes:   rows of images have positions in time, height and width.

        Communicates: waits for rows that are still on their way.
        """
        shard.wait(number)
        group = shard.schedule.group_of(number, shard.role.grid_rank)
        layout = layout_of(group, shard.lengths, shard.role)
        rows = layout.rows(place.cp_rank)
        first, end = shard.rows.first_token[number : number + 2]
        local = _places(rows)
        columns = _columns(shard, slice(first, end), depths)
        placed = _positions(shard, slice(first, end), axes)
        columns |= placed
        if "shares" in columns:
            columns["sequences"] = _sequences(shard, slice(first, end), group.samples)
        upload = upload or Upload(torch.device("cpu"))
        pin = upload.device.type != "cpu"
        fields = gather_fields([*columns.values()], local, [0.0] * len(columns), pin=pin)
        on_host = dict(zip(columns, fields.views, strict=True))
        here = dict(zip(columns, fields.via(upload).views, strict=True))
        upload.arrive()  # kernels below read the copies; behind the microbatch that was launched
        targets = [here[f"targets_{depth}"].long() for depth in range(1 + depths)]
        masks = [f"loss_mask_{depth}" for depth in range(1 + depths)]
        router_rows = layout.shard(rows, place.tp_rank)
        mtp = [MTPInputs(targets[d - 1], targets[d], here[masks[d]]) for d in range(1, 1 + depths)]
        inputs = None
        if shard.role.last_stage:
            inputs = _loss_inputs(here, place, max(1, len(group.samples)))
        kept = shard.kept(number)
        teacher = None
        if shard.teacher_head is not None:
            teacher = here["teacher_hidden"], shard.teacher_head
        return cls(
            place=place,
            layout=layout,
            rows=rows,
            at=_places(rows, int(first)),
            at_router=_places(router_rows, int(shard.rows.first_router[number])),
            tokens=here["tokens"].long(),
            targets=targets[0],
            positions=torch.stack([here[name].long() for name in placed]).squeeze(0),
            inputs=inputs,
            mtp=tuple(mtp),
            loss_rows=tuple(on_host[mask].nonzero()[:, 0] for mask in masks),
            kept=None if kept is None else kept.select(local),
            teacher=teacher,
        )


def _places(rows: Tensor, first: int = 0) -> Tensor:
    """Numbers the rows that are not padding from ``first`` on; -1 in padding."""
    real = rows >= 0
    return torch.where(real, real.cumsum(0) + (first - 1), -1)


def _columns(shard: BatchShard, part: slice, depths: int) -> dict[str, Tensor]:
    """The columns that a microbatch takes of rows ``part`` of a shard."""
    names = ["tokens"]
    names += [f"targets_{depth}" for depth in range(1 + depths)]
    names += [f"loss_mask_{depth}" for depth in range(1 + depths)]
    names += _SCORES
    return {name: shard.stored[name][part] for name in names if name in shard.stored}


def _positions(shard: BatchShard, part: slice, axes: bool) -> dict[str, Tensor]:
    """Positions of the same rows in their samples; with images and ``axes`` in each of three."""
    rows = shard.rows.tokens[part]
    lengths = shard.lengths
    positions = (rows - lengths.starts[lengths.sample_of(rows)])[None]
    if axes and shard.images:
        (images,) = shard.images.values()
        positions = axial_positions(rows, lengths, images.work.images)
    return {f"positions_{i}": torch.from_numpy(axis).int() for i, axis in enumerate(positions)}


def _sequences(shard: BatchShard, part: slice, samples: Sequence[int]) -> Tensor:
    """[N] int32, place among ``samples`` of the sample of each row ``part`` of a shard."""
    of_rows = shard.lengths.sample_of(shard.rows.tokens[part])
    return torch.from_numpy(np.searchsorted(np.asarray(samples, np.int64), of_rows)).int()


def _loss_inputs(columns: Mapping[str, Tensor], place: RankCoords, samples: int) -> LossInputs:
    rollout = columns["rollout_logprobs"]
    shares = columns.get("shares")
    sequences = None
    if shares is not None:
        sequences = Sequences(columns["sequences"].long(), samples, shares, place.cp_group)
    return LossInputs(
        old_logprobs=columns.get("old_logprobs", torch.zeros_like(rollout)),
        rollout_logprobs=rollout,
        ref_logprobs=columns.get("ref_logprobs"),
        advantages=columns["advantages"],
        loss_mask=columns["loss_mask_0"],
        weights=columns.get("weights"),
        corrections=columns.get("corrections"),
        sequences=sequences,
        ages=columns.get("ages"),
    )
