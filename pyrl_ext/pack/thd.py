"""megatron-core's description of packed sequences, for attention kernels that take ``thd``."""

# megatron-core has no stubs
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.lazy import missing
from pyrl_ext.pack.layout import TokenLayout

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def packed_seq_params(
    seqlens: Sequence[int],
    cp_size: int = 1,
    *,
    tp_size: int = 1,
    align: int = 1,
    device: torch.device | str | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> PackedSeqParams:
    """The ``PackedSeqParams`` of the rows that `TokenLayout` places.

    Its bounds count padded rows: one tensor in all four places says that no rows lie between
    sequences. Rows of padding are attended to by rows of padding alone, as attention is causal.

    Args:
        seqlens: [S] rows of each sequence [tokens].
        cp_size, tp_size, align: as in `TokenLayout`.
        device: of the bounds; None: the CPU.
        cp_group: the ranks of a group of dynamic context parallelism, ``cp_size`` of them; None:
            megatron's context-parallel group.

    Raises:
        ValueError: as `TokenLayout`; there is no sequence; ``cp_group`` has another size.
    """
    layout = TokenLayout(tuple(seqlens), cp_size, tp_size, align)
    if not layout.seqlens:
        raise ValueError("packed_seq_params: 0 sequences, expected at least 1")
    dynamic: dict[str, Any] = {}
    if cp_group is not None:
        if cp_group.size() != cp_size:
            raise ValueError(
                f"packed_seq_params: cp_group has {cp_group.size()} ranks, expected cp_size "
                f"({cp_size})"
            )
        dynamic = {"cp_group": cp_group, "local_cp_size": cp_size}
    bounds = [0, *accumulate(layout.padded_seqlens)]
    ends = torch.tensor(bounds, dtype=torch.int32, device=device)
    return thd_params(ends, layout.max_padded_seqlen, **dynamic)


def thd_params(ends: Tensor, longest: int, **dynamic: Any) -> PackedSeqParams:
    """``PackedSeqParams`` of sequences without rows between them.

    Args:
        ends: [S + 1] int32 bounds of the sequences.
        longest: rows of the longest one.
        dynamic: its fields of dynamic context parallelism.
    """
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ModuleNotFoundError as error:
        raise missing("pyrl_ext.pack.packed_seq_params", error) from None

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **dynamic,
    )
