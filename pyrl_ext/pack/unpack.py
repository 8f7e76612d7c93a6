"""The rows of context-parallel ranks back in the order of the batch."""

# torch.distributed is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.ops import gather_rows
from pyrl_ext.pack.layout import TokenLayout


def unpack_rows(
    local: Tensor, layout: TokenLayout, cp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """[num_local, ...] of every rank -> [T, ...] without padding, sequence after sequence.

    The gradient is that of this rank's rows: each rank's loss is its own.

    Args:
        local: rows of this rank, as ``layout.rows(cp_rank)`` placed them.
        layout: with ``starts`` the rows are in the order of ``seqlens`` too.
        cp_group: the ``layout.cp_size`` ranks that share the rows; None: this one has all.

    Raises: ValueError if the number of rows or of ranks is another one.
    Communicates: one all-gather over ``cp_group``.
    """
    ranks = 1 if cp_group is None else cp_group.size()
    if ranks != layout.cp_size or len(local) != layout.num_local:
        raise ValueError(
            f"unpack_rows: {len(local)} rows and {ranks} ranks, expected {layout.num_local} rows "
            f"on each of cp_size {layout.cp_size} ranks. Give the layout that packed them"
        )
    parts = [local]
    if cp_group is not None and ranks > 1:
        sent = local.detach().contiguous()
        parts = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(parts, sent, group=cp_group)
        parts[cp_group.rank()] = local
    return gather_rows(torch.cat(parts), layout.gathered_rows.to(local.device))
