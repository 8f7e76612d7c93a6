"""Widths of attention: of one head, of a rank's part, and of the rollout engine's KV cache."""

from __future__ import annotations

from typing import NamedTuple

from pyrl_ext.plan.model.families.blocks import GroupedQuery, Latent
from pyrl_ext.plan.model.sizes import ModelSizes
from pyrl_ext.plan.model.units import DTYPE_BYTES
from pyrl_ext.plan.plan import Plan


class Heads(NamedTuple):
    """The elements that attention computes for one row on a tensor-parallel rank."""

    query: int
    key: int
    value: int
    output: int
    number: int
    """Query heads."""
    rotary: int
    """Rotated elements of one head."""


def head_widths(sizes: ModelSizes) -> tuple[int, int]:
    """Elements of a query or key head, and of a value head."""
    if isinstance(sizes, Latent):
        return sizes.qk_nope_head_dim + sizes.qk_rope_head_dim, sizes.v_head_dim
    if isinstance(sizes, GroupedQuery):
        return sizes.head_width, sizes.head_width
    raise TypeError(
        f"head_widths: {type(sizes).__name__}, expected a family with Latent or GroupedQuery "
        "attention (plan/model/families/blocks.py)"
    )


def kv_heads(plan: Plan, tp: int) -> int:
    """Key/value heads that one of `tp` ranks holds; at least one, as fewer are copied."""
    sizes = plan.sizes
    return max(1, (sizes.query_groups or sizes.num_attention_heads) // tp)


def heads_of(plan: Plan) -> Heads:
    """The part of attention that a tensor-parallel rank computes."""
    sizes = plan.sizes
    tp = plan.parallel.tp
    number = -(-sizes.num_attention_heads // tp)
    width, value = head_widths(sizes)
    if isinstance(sizes, Latent):  # keys and values are expanded to all heads
        both = number * width
        value = number * value
        return Heads(both, both, value, value, number, sizes.qk_rope_head_dim)
    shared = width * kv_heads(plan, tp)
    rotary = width if sizes.rotary_width else 0
    return Heads(number * width, shared, shared, number * width, number, rotary)


def kv_bytes_per_token(plan: Plan, tp: int) -> int:
    """Bytes that the engine's KV cache holds for one token on each of its `tp` GPUs, in the layers
    that attend; those that draft tokens do too."""
    sizes = plan.sizes
    if isinstance(sizes, Latent):  # one latent for all heads: a copy on every rank
        width = sizes.kv_lora_rank + sizes.qk_rope_head_dim
    else:
        width = kv_heads(plan, tp) * sum(head_widths(sizes))
    attending = sum(kind.mixer == "attention" for kind in sizes.layer_kinds) + plan.draft_layers
    return DTYPE_BYTES[plan.rollout_dtype] * attending * width
