from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyrl_ext.ops._triton import Launch, meta, refuse_device, short
from pyrl_ext.ops.dtypes import dtype_of

from .native import heads_of

if TYPE_CHECKING:
    from pyrl_ext.plan import Plan


def refuse(query: Tensor, *_: Any) -> str | None:
    return refuse_device("query", query)


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


def launches(plan: Plan, config: Mapping[str, Any]) -> Iterator[Launch]:
    """The launches of a run of ``plan``, forward and back."""
    sizes = plan.sizes
    dtype = dtype_of(plan.model.dtype)
    latent = config.get("multi_latent_attention", False)
    turned = sizes.rotary_width
    heads = config["num_attention_heads"] // plan.parallel.tp
    if latent:
        wide = config["qk_head_dim"] + turned
        keys = (1, turned)
    else:
        wide = config["kv_channels"]
        keys = config["num_query_groups"] // plan.parallel.tp, wide
    places = ("neighbours", "halves") if latent else ("halves", "halves")
    for back in (False, True):

        def turn(rows: int, back: bool = back) -> object:
            query = meta(rows, heads, wide, dtype=dtype)
            key = meta(rows, *keys, dtype=dtype)
            source, result = places[:: -1 if back else 1]
            return rotary(query, key, meta(rows, turned), latent, source, result, back)

        name = f"rotary {short(dtype)} {heads} x {wide}, {keys[0]} x {keys[1]}, {turned} turned"
        yield name + (" back" if back else ""), turn
