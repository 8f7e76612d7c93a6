"""Nemotron-H and Nemotron-3 (HF ``NemotronH``): layers of one block each, a Mamba-2 mixer,
attention without positions, an MLP of squared ReLUs, or sigmoid-routed experts of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyrl_ext.models import Family, blocks
from pyrl_ext.models.weight import Weight
from pyrl_ext.models.weight_table import language_model
from pyrl_ext.ops import squared
from pyrl_ext.plan.model.families.nemotron_h import NemotronH

# part of a name that other families have -> the same part of this one's
NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
}


def config(sizes: NemotronH) -> dict[str, Any]:
    settings = blocks.common(sizes) | blocks.grouped_query(sizes)
    settings |= {"activation_func": squared, "gated_linear_unit": False}
    if sizes.router_layers:
        settings |= blocks.sigmoid_router(sizes)
    return settings | {
        "mamba_num_heads": sizes.mamba_num_heads,
        "mamba_head_dim": sizes.mamba_head_dim,
        "mamba_num_groups": sizes.n_groups,
        "mamba_state_dim": sizes.ssm_state_size,
    }


def _mamba(layer: int, sizes: NemotronH) -> list[Weight]:
    hf = f"model.layers.{layer}.mixer."
    mc = f"decoder.layers.{layer}.self_attention."
    hidden = sizes.hidden_size
    heads = sizes.mamba_num_heads
    taps = sizes.conv_kernel
    inner = heads * sizes.mamba_head_dim
    shared = sizes.n_groups * sizes.ssm_state_size
    projections = {hf + "in_proj.weight": (inner, inner, shared, shared, heads)}
    channels = inner, shared, shared
    decays, steps, skips = (Weight.rows(hf + n, mc + n, heads) for n in ("A_log", "dt_bias", "D"))
    names = hf + "conv1d.weight", hf + "conv1d.bias"
    output = hf + "out_proj.weight", mc + "out_proj.weight"
    return [
        Weight.sectioned(mc + "in_proj.weight", projections, 1, hidden),
        Weight.sectioned(mc + "conv1d_weight", {names[0]: channels}, 1, 1, taps),
        Weight.sectioned(mc + "conv1d_bias", {names[1]: channels}, 1),
        replace(decays, start="decays"),
        replace(steps, start="steps"),
        replace(skips, start="ones"),
        Weight.rows(hf + "norm.weight", mc + "norm.weight", inner),
        Weight.columns(*output, hidden, inner),
    ]


def _layer(layer: int, sizes: NemotronH) -> list[Weight]:
    kind = sizes.layer_kinds[layer]
    mc = f"decoder.layers.{layer}."
    norm = mc + ("input_layernorm" if kind.mixer else "pre_mlp_layernorm") + ".weight"
    rows = {
        "mamba": _mamba,
        "attention": blocks.grouped_query_rows,
        "moe": blocks.experts,
        "mlp": blocks.dense,
    }[kind.mixer or kind.feed_forward or ""]
    before = Weight.same(f"model.layers.{layer}.norm.weight", norm, sizes.hidden_size)
    return [before, *rows(layer, sizes)]


def _named(row: Weight) -> Weight:
    """A row of other families' with this one's names."""
    names = row.hf_names
    for theirs, ours in NAMES.items():
        names = tuple(name.replace(theirs, ours) for name in names)
    final = names == ("backbone.norm_f.weight",)
    return replace(row, hf_names=names, start="ones" if final else row.start)


def weights(sizes: NemotronH, mtp_layers: int) -> list[Weight]:
    layers = (_layer(i, sizes) for i in range(sizes.num_hidden_layers))
    return [_named(row) for row in language_model(sizes, layers)]


def ignored(sizes: NemotronH, mtp_layers: int) -> dict[str, str]:
    return blocks.ignored(sizes, mtp_layers) | {r"mtp\..*": "layers for multi-token prediction"}


FAMILY = Family(config, weights, ignored)
