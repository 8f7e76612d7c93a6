"""Microbatch: the rows of some samples that one rank computes, in its order and on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrl_ext.dist.topology import Topology
from pyrl_ext.dist.upload import Upload
from pyrl_ext.loss.inputs import LossInputs
from pyrl_ext.ops import gather_fields
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.layout import TokenLayout


class Ahead(NamedTuple):
    """What the layer for multi-token prediction at one depth reads and predicts, [M] each.

    The layer at depth d sees token t + d beside the state of row t, and predicts token t + d + 1.

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
        layout:    where every row of the samples lies on every rank.
        rows:      [M] int64 on the host, row of the batch's stream in each local row, -1 = padding.
        tokens:    [M] int64, model input; padding holds 0.
        targets:   [M] int64, the token to score at each row; padding holds 0.
        positions: [M] int64, counting from 0 in each sample; padding holds 0.
        inputs:    [M] each, what the loss sees; zeros and a False mask in padding.
        ahead:     one entry a layer for multi-token prediction.
    """

    layout: TokenLayout
    rows: Tensor
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    inputs: LossInputs
    ahead: tuple[Ahead, ...] = ()

    @classmethod
    def of(
        cls,
        batch: Batch,
        ids: Sequence[int],
        topo: Topology,
        depths: int = 0,
        upload: Upload | None = None,
    ) -> Microbatch:
        """Samples ``ids`` of ``batch`` as this rank sees them. Without samples: padding alone, so
        that the rank takes part in the collectives of the others.

        Args:
            batch:  on the host.
            depths: layers for multi-token prediction.
            upload: how the rows get to the device; its `arrive` is for the caller to say. None:
                they may be used at once.
        """
        layout = TokenLayout(
            tuple(batch.seqlens[i] for i in ids),
            cp_size=topo.cp_size,
            tp_size=topo.tp_size,
            starts=tuple(int(batch.starts[i]) for i in ids),
        )
        rows = layout.rows(topo.cp_rank)
        if not ids:
            layout = TokenLayout((1,), cp_size=topo.cp_size, tp_size=topo.tp_size)
            rows = torch.full_like(layout.rows(topo.cp_rank), -1)
        there = upload or Upload(topo.device)

        def local(fields: dict[str, Tensor], at: Tensor = rows) -> dict[str, Tensor]:
            pin = topo.device.type != "cpu"
            taken = gather_fields(list(fields.values()), at, [0.0] * len(fields), pin=pin)
            return dict(zip(fields, taken.via(there).views, strict=True))

        names = ("tokens", "targets", "positions", "rollout_logprobs", "advantages", "loss_mask")
        names += ("old_logprobs", "ref_logprobs")
        found: dict[str, Any] = local({n: f for n in names if (f := getattr(batch, n)) is not None})
        found.setdefault("old_logprobs", torch.zeros_like(found["rollout_logprobs"]))
        found.setdefault("ref_logprobs", None)
        shifted = [batch.ahead(rows, depth) for depth in range(depths + 1)] if depths else []
        ahead = tuple(
            Ahead(
                **local({"tokens": batch.targets}, before),
                **local({"targets": batch.targets, "loss_mask": batch.loss_mask}, at),
            )
            for before, at in pairwise(shifted)
        )
        if upload is None:
            there.arrive()
        of_model = {name: found.pop(name) for name in ("tokens", "targets", "positions")}
        return cls(layout, rows, **of_model, inputs=LossInputs(**found), ahead=ahead)

    def router_rows(self, topo: Topology) -> Tensor:
        """[M / tp] int64, `rows` of the sequence shard that this rank's routers see."""
        part = len(self.rows) // topo.tp_size
        return self.rows[topo.tp_rank * part : (topo.tp_rank + 1) * part]
