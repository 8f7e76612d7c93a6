from __future__ import annotations

from typing import Any

from torch import Tensor

from pyrl_ext.ops._triton import refuses

from .native import heads_of

refuse = refuses("query")


def rotary(
    query: Tensor, key: Tensor, turns: Tensor, last: bool, source: str, result: str, back: bool
) -> tuple[Tensor, Tensor]:
    from .triton_kernel import rotary_kernel, tiles  # triton takes a while to import

    query = heads_of(query)
    key = heads_of(key)
    outputs = query.new_empty(query.shape), key.new_empty(key.shape)
    sizes = *query.shape[1:], *key.shape[1:], turns.shape[1]
    if not len(turns):
        return outputs
    kernel: Any = rotary_kernel
    kernel[(len(turns),)](
        query,
        query.stride(0),
        query.stride(1),
        key,
        key.stride(0),
        key.stride(1),
        turns.contiguous(),
        *outputs,
        *sizes,
        LAST=last,
        FROM=source == "neighbours",
        TO=result == "neighbours",
        BACK=back,
        **tiles(*sizes),
    )
    return outputs
