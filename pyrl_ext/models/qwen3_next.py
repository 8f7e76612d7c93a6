"""Qwen3-Next (HF ``Qwen3Next``): gated delta net layers and gated attention, softmax-routed experts
and a gated shared one, norms centred at zero. Its layer for multi-token prediction attends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pyrl_ext.models import Family, blocks, qwen3_moe
from pyrl_ext.models.weight import Weight
from pyrl_ext.plan.model.families.qwen3_next import DeltaNets, Qwen3Next

Projections = tuple[int, dict[str, tuple[int, ...]]]


def family_of(
    plain: Callable[[Any], dict[str, Any]], projections: Callable[[Any], Projections]
) -> Family[Any]:
    """The family of a model with gated delta nets.

    Args:
        plain: settings of megatron's config without them.
        projections: groups of heads, and what the checkpoint calls each input projection of a delta
            net -> rows of a group in each of its sections.
    """

    def config(sizes: DeltaNets) -> dict[str, Any]:
        settings = plain(sizes) | {"layernorm_zero_centered_gamma": True}
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

    def mixer(layer: int, sizes: DeltaNets) -> list[Weight]:
        if layer == sizes.num_hidden_layers or not sizes.layer_kinds[layer].has_state:
            return blocks.grouped_query_rows(layer, sizes)
        return _delta_net(layer, sizes, *projections(sizes))

    def weights(sizes: DeltaNets, mtp_layers: int) -> list[Weight]:
        return [*_named(blocks.decoder(mixer)(sizes, mtp_layers), sizes)]

    return Family(config, weights, ignored)


def _delta_net(
    layer: int, sizes: DeltaNets, groups: int, projections: dict[str, tuple[int, ...]]
) -> list[Weight]:
    hf = f"model.layers.{layer}.linear_attn."
    mc = f"decoder.layers.{layer}.self_attention."
    hidden = sizes.hidden_size
    value = sizes.linear_value_head_dim
    keys = sizes.linear_num_key_heads * sizes.linear_key_head_dim
    heads = sizes.linear_num_value_heads
    inputs = {f"{hf}{name}.weight": rows for name, rows in projections.items()}
    channels = {hf + "conv1d.weight": (keys, keys, heads * value)}
    decays, steps = (Weight.rows(hf + name, mc + name, heads) for name in ("A_log", "dt_bias"))
    norm = hf + "norm.weight", mc + "out_norm.weight"
    output = hf + "out_proj.weight", mc + "out_proj.weight"
    return [
        Weight.sectioned(mc + "in_proj.weight", inputs, groups, hidden),
        Weight.sectioned(mc + "conv1d.weight", channels, 1, 1, sizes.linear_conv_kernel_dim),
        replace(decays, start="decays"),
        replace(steps, start="ones"),
        replace(Weight.same(*norm, value), start="ones"),
        Weight.columns(*output, hidden, heads * value),
    ]


# the names of other families' layers for multi-token prediction, and this one's
AHEAD = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def _named(rows: list[Weight], sizes: DeltaNets) -> Iterator[Weight]:
    """The rows of other families with this one's names, norms that start at zero, and the gates of
    shared experts."""
    ahead = f"model.layers.{sizes.num_hidden_layers}."

    def renamed(name: str) -> str:
        layer, found, rest = name.replace(".shared_experts.", ".shared_expert.").partition(ahead)
        own = AHEAD.get(rest.removesuffix(".weight"))
        if not found:
            return layer
        return f"mtp.{own}.weight" if own else f"mtp.layers.0.{rest}"

    for row in rows:
        names = tuple(map(renamed, row.hf_names))
        centred = row.hf_names[0].endswith("norm.weight") and row.start is None
        yield replace(row, hf_names=names, start="zeros" if centred else row.start)
        if names[0].endswith("shared_expert.down_proj.weight"):
            hf = names[0].replace("shared_expert.down_proj", "shared_expert_gate")
            mc = row.megatron_name.replace("linear_fc2.weight", "gate_weight")
            yield Weight.same(hf, mc, 1, sizes.hidden_size)


def ignored(sizes: DeltaNets, mtp_layers: int) -> dict[str, str]:
    off = {r"mtp\..*": "MTP layer; the plan says model.mtp: off"}
    return blocks.ignored(sizes, mtp_layers) | ({} if mtp_layers else off)


def _projections(sizes: Qwen3Next) -> Projections:
    key = sizes.linear_key_head_dim
    shared = sizes.linear_num_value_heads // sizes.linear_num_key_heads
    values = shared * sizes.linear_value_head_dim
    rows = {"in_proj_qkvz": (key, key, values, values), "in_proj_ba": (shared, shared)}
    return sizes.linear_num_key_heads, rows


FAMILY = family_of(qwen3_moe.config, _projections)
