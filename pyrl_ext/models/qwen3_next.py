"""Qwen3-Next (HF ``Qwen3Next``): gated delta net layers and gated attention, softmax-routed experts
and a gated shared one, norms centred at zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pyrl_ext.models import Family, blocks, qwen3_moe
from pyrl_ext.models.weight import Weight
from pyrl_ext.plan.model.families.qwen3_next import Qwen3Next


def config(sizes: Qwen3Next) -> dict[str, Any]:
    settings = qwen3_moe.config(sizes) | {"layernorm_zero_centered_gamma": True}
    states = [int(kind.has_state) for kind in sizes.layer_kinds]
    if not any(states):
        return settings
    return settings | {
        "linear_attention_freq": states,
        "linear_conv_kernel_dim": sizes.linear_conv_kernel_dim,
        "linear_key_head_dim": sizes.linear_key_head_dim,
        "linear_value_head_dim": sizes.linear_value_head_dim,
        "linear_num_key_heads": sizes.linear_num_key_heads,
        "linear_num_value_heads": sizes.linear_num_value_heads,
    }


def _mixer(layer: int, sizes: Qwen3Next) -> list[Weight]:
    if not sizes.layer_kinds[layer].has_state:
        return blocks.grouped_query_rows(layer, sizes)
    hf, mc = f"model.layers.{layer}.linear_attn.", f"decoder.layers.{layer}.self_attention."
    hidden, keys, values = (
        sizes.hidden_size,
        sizes.linear_num_key_heads,
        sizes.linear_num_value_heads,
    )
    key, value = sizes.linear_key_head_dim, sizes.linear_value_head_dim
    shared = values // keys  # value heads that share a key head
    projections = {
        hf + "in_proj_qkvz.weight": (key, key, shared * value, shared * value),
        hf + "in_proj_ba.weight": (shared, shared),
    }
    channels = {hf + "conv1d.weight": (keys * key, keys * key, values * value)}
    decays, steps = (Weight.rows(hf + name, mc + name, values) for name in ("A_log", "dt_bias"))
    norm = hf + "norm.weight", mc + "out_norm.weight"
    output = hf + "out_proj.weight", mc + "out_proj.weight"
    return [
        Weight.sectioned(mc + "in_proj.weight", projections, keys, hidden),
        Weight.sectioned(mc + "conv1d.weight", channels, 1, 1, sizes.linear_conv_kernel_dim),
        replace(decays, start="decays"),
        replace(steps, start="ones"),
        replace(Weight.same(*norm, value), start="ones"),
        Weight.columns(*output, hidden, values * value),
    ]


def _named(rows: list[Weight], sizes: Qwen3Next) -> Iterator[Weight]:
    """The rows of other families with this one's names, norms that start at zero, and the gates of
    shared experts."""
    for row in rows:
        names = tuple(name.replace(".shared_experts.", ".shared_expert.") for name in row.hf_names)
        centred = names[0].endswith("norm.weight") and row.start is None
        yield replace(row, hf_names=names, start="zeros" if centred else row.start)
        if names[0].endswith("shared_expert.down_proj.weight"):
            hf = names[0].replace("shared_expert.down_proj", "shared_expert_gate")
            mc = row.megatron_name.replace("linear_fc2.weight", "gate_weight")
            yield Weight.same(hf, mc, 1, sizes.hidden_size)


def weights(sizes: Qwen3Next, mtp_layers: int) -> list[Weight]:
    return [*_named(blocks.decoder(_mixer)(sizes, mtp_layers), sizes)]


def ignored(sizes: Qwen3Next, mtp_layers: int) -> dict[str, str]:
    return blocks.ignored(sizes, mtp_layers) | {r"mtp\..*": "layers for multi-token prediction"}


FAMILY = Family(config, weights, ignored)
