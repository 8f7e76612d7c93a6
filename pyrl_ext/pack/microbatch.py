"""Microbatch: the rows of some samples that one rank computes, in its order and on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrl_ext.dist.topology import Place
from pyrl_ext.dist.upload import Upload
from pyrl_ext.loss.inputs import LossInputs
from pyrl_ext.ops import gather_fields
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.layout import TokenLayout

_FIELDS = (
    *("tokens", "targets", "positions", "rollout_logprobs", "advantages", "loss_mask"),
    *("old_logprobs", "ref_logprobs"),
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
        rows:      [M] int64 on the host, row of the batch's stream in each local row, -1 = padding.
        tokens:    [M] int64, model input; padding holds 0.
        targets:   [M] int64, the token to score at each row; padding holds 0.
        positions: [M] int64, counting from 0 in each sample; padding holds 0.
        inputs:    [M] each, the inputs of the loss; zeros and a False mask in padding.
        mtp:       one entry an MTP layer.
    """

    place: Place
    layout: TokenLayout
    rows: Tensor
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    inputs: LossInputs
    mtp: tuple[MTPInputs, ...] = ()

    @classmethod
    def of(
        cls,
        batch: Batch,
        ids: Sequence[int],
        place: Place,
        depths: int = 0,
        upload: Upload | None = None,
    ) -> Microbatch:
        """Samples ``ids`` of ``batch`` as the rank at ``place`` sees them.

        Without samples the microbatch is padding alone, so that the rank takes part in the
        collectives of the others.

        Args:
            batch:  on the host.
            depths: MTP layers whose inputs are needed.
            upload: copies the rows to its device; the caller waits by its `arrive`. None: they stay
                on the host.
        """
        layout = TokenLayout(
            tuple(batch.seqlens[i] for i in ids) or (1,),
            cp_size=place.cp_size,
            tp_size=place.tp_size,
            align=place.align,
            starts=tuple(int(batch.starts[i]) for i in ids) or (-1,),
        )
        rows = layout.rows(place.cp_rank)
        upload = upload or Upload(torch.device("cpu"))
        fields: dict[str, Any] = {n: f for n in _FIELDS if (f := getattr(batch, n)) is not None}
        local: dict[str, Any] = _gather(fields, rows, upload)
        local.setdefault("old_logprobs", torch.zeros_like(local["rollout_logprobs"]))
        local.setdefault("ref_logprobs", None)
        model_inputs = {name: local.pop(name) for name in ("tokens", "targets", "positions")}
        mtp = _mtp_inputs(batch, rows, depths, upload)
        return cls(place, layout, rows, **model_inputs, inputs=LossInputs(**local), mtp=mtp)

    @property
    def router_rows(self) -> Tensor:
        """[M / tp_size] int64, `rows` of the sequence shard that this rank's routers see."""
        return self.layout.shard(self.rows, self.place.tp_rank)


def _mtp_inputs(batch: Batch, rows: Tensor, depths: int, upload: Upload) -> tuple[MTPInputs, ...]:
    shifted = [batch.rows_ahead(rows, depth) for depth in range(depths + 1)] if depths else []
    targets = {"targets": batch.targets, "loss_mask": batch.loss_mask}
    return tuple(
        MTPInputs(
            **_gather({"tokens": batch.targets}, before, upload), **_gather(targets, at, upload)
        )
        for before, at in pairwise(shifted)
    )


def _gather(fields: dict[str, Tensor], rows: Tensor, upload: Upload) -> dict[str, Tensor]:
    """The ``rows`` of each field, on the upload's device; zeros in padding."""
    pin = upload.device.type != "cpu"
    taken = gather_fields(list(fields.values()), rows, [0.0] * len(fields), pin=pin)
    return dict(zip(fields, taken.via(upload).views, strict=True))
