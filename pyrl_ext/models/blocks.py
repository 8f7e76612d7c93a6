"""Parts that several families use: settings of megatron's config, rows of the weight table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyrl_ext.models.weight import Weight
from pyrl_ext.models.weight_table import language_model, mlp, routed_experts
from pyrl_ext.plan.model.families.blocks import GroupedQuery, Latent, SigmoidRouted
from pyrl_ext.plan.model.sizes import ModelSizes

# megatron's config -------------------------------------------------------------------------------


def common(sizes: ModelSizes) -> dict[str, Any]:
    """The settings of megatron's config that every family derives from its sizes."""
    import torch.nn.functional as F

    config = {
        "num_layers": sizes.num_hidden_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "ffn_hidden_size": sizes.intermediate_size,
        "layernorm_epsilon": sizes.rms_norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
    }
    if not (sparse := sizes.router_layers):
        return config
    return config | {
        "num_moe_experts": sizes.num_experts,
        "moe_layer_freq": [int(i in sparse) for i in range(sizes.num_hidden_layers)],
        "moe_router_topk": sizes.topk,
        "moe_ffn_hidden_size": sizes.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": sizes.shared_expert_width or None,
        "moe_shared_expert_gate": sizes.has_shared_expert_gate,
    }


def grouped_query(sizes: GroupedQuery) -> dict[str, Any]:
    """Settings of grouped-query attention."""
    return {
        "num_query_groups": sizes.num_key_value_heads,
        "kv_channels": sizes.head_width,
        "qk_layernorm": sizes.has_qk_norm,
        "add_qkv_bias": sizes.attention_bias,
        "attention_output_gate": sizes.has_output_gate,
    }


def latent(sizes: Latent) -> dict[str, Any]:
    """Settings of multi-latent attention."""
    config = {
        "multi_latent_attention": True,
        "q_lora_rank": sizes.q_lora_rank,
        "kv_lora_rank": sizes.kv_lora_rank,
        "qk_head_dim": sizes.qk_nope_head_dim,
        "qk_pos_emb_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "yarn" if sizes.yarn else "rope",
    }
    if sizes.yarn is None:
        return config
    # these scale the attention logits; PackedRotary scales the wavelengths
    return config | {
        "rotary_scaling_factor": sizes.yarn.factor,
        "mscale_all_dim": sizes.yarn.mscale_all_dim,
    }


def sigmoid_router(sizes: SigmoidRouted) -> dict[str, Any]:
    """Settings of a router that chooses experts by the sigmoid of their score plus a bias."""
    groups = {
        "moe_router_num_groups": sizes.n_group,
        "moe_router_group_topk": sizes.topk_group,
    }
    return (groups if sizes.is_group_limited else {}) | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": sizes.routed_scaling_factor,
    }


# the weight table --------------------------------------------------------------------------------


def decoder[S: ModelSizes](
    attention: Callable[[int, S], list[Weight]],
) -> Callable[[S, int], list[Weight]]:
    """The function that builds the table of a decoder.

    Args:
        attention: (layer, sizes) -> rows of that layer's attention.
    """

    def weights(sizes: S, mtp_layers: int) -> list[Weight]:
        first = sizes.num_hidden_layers
        sparse = {*sizes.router_layers, *range(first, first + mtp_layers * bool(sizes.num_experts))}
        layers = (
            _layer(i, sizes, attention(i, sizes), (experts if i in sparse else dense)(i, sizes))
            for i in range(first + mtp_layers)
        )
        table = language_model(sizes, layers)
        return table + [row for i in range(mtp_layers) for row in _mtp(i, first + i, sizes)]

    return weights


def _layer(
    layer: int, sizes: ModelSizes, attention: list[Weight], feed_forward: list[Weight]
) -> list[Weight]:
    hf = f"model.layers.{layer}."
    mc = f"decoder.layers.{layer}."
    hidden = sizes.hidden_size
    before = hf + "input_layernorm.weight", mc + "input_layernorm.weight"
    between = hf + "post_attention_layernorm.weight", mc + "pre_mlp_layernorm.weight"
    return [
        Weight.same(*before, hidden),
        *attention,
        Weight.same(*between, hidden),
        *feed_forward,
    ]


def dense(layer: int, sizes: ModelSizes) -> list[Weight]:
    """Tensors of an MLP."""
    return mlp(layer, "mlp", sizes, sizes.intermediate_size)


def experts(layer: int, sizes: ModelSizes) -> list[Weight]:
    """Tensors of routed experts, their router, and the shared expert."""
    table = routed_experts(layer, sizes)
    if sizes.has_router_bias:
        gate = f"model.layers.{layer}.mlp.gate"
        router = f"decoder.layers.{layer}.mlp.router"
        names = gate + ".e_score_correction_bias", router + ".expert_bias"
        # next to the router's weight: engines need both before they can use either
        table.insert(1, Weight.same(*names, sizes.num_experts, float32=True))
    if width := sizes.shared_expert_width:
        table += mlp(layer, "mlp.shared_experts", sizes, width)
    return table


def _mtp(depth: int, layer: int, sizes: ModelSizes) -> list[Weight]:
    """The tensors of an MTP layer other than those of its decoder layer."""
    hf = f"model.layers.{layer}."
    mc = f"mtp.layers.{depth}."
    hidden = sizes.hidden_size
    return [
        Weight.same(hf + "enorm.weight", mc + "enorm.weight", hidden),
        Weight.same(hf + "hnorm.weight", mc + "hnorm.weight", hidden),
        Weight.rows(hf + "eh_proj.weight", mc + "eh_proj.weight", hidden, 2 * hidden),
        Weight.same(hf + "shared_head.norm.weight", mc + "final_layernorm.weight", hidden),
    ]


def grouped_query_rows(layer: int, sizes: GroupedQuery) -> list[Weight]:
    """Tensors of `grouped_query` attention."""
    hf = f"model.layers.{layer}.self_attn."
    mc = f"decoder.layers.{layer}.self_attention."
    heads = (sizes.num_attention_heads, sizes.num_key_value_heads)
    hidden = sizes.hidden_size
    width = sizes.head_width
    table = []
    for kind in ("weight", "bias") if sizes.attention_bias else ("weight",):
        q, k, v = (f"{hf}{name}_proj.{kind}" for name in "qkv")
        head = (width, hidden) if kind == "weight" else (width,)
        name = f"{mc}linear_qkv.{kind}"
        gates = sizes.has_output_gate
        table.append(Weight.grouped(q, k, v, name, heads, *head, gates=gates))
    if sizes.has_qk_norm:
        table.append(Weight.same(hf + "q_norm.weight", mc + "q_layernorm.weight", width))
        table.append(Weight.same(hf + "k_norm.weight", mc + "k_layernorm.weight", width))
    return [*table, _output(layer, hidden, heads[0] * width)]


def _output(layer: int, hidden: int, width: int) -> Weight:
    hf = f"model.layers.{layer}.self_attn."
    mc = f"decoder.layers.{layer}.self_attention."
    return Weight.columns(hf + "o_proj.weight", mc + "linear_proj.weight", hidden, width)


def latent_rows(layer: int, sizes: Latent) -> list[Weight]:
    """Tensors of `latent` attention."""
    hf = f"model.layers.{layer}.self_attn."
    mc = f"decoder.layers.{layer}.self_attention."
    hidden = sizes.hidden_size
    heads = sizes.num_attention_heads
    narrow = sizes.kv_lora_rank
    queries = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
    kv_a = hf + "kv_a_proj_with_mqa.weight", mc + "linear_kv_down_proj.weight"
    kv_b = hf + "kv_b_proj.weight", mc + "linear_kv_up_proj.weight"
    both = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    table = [
        Weight.same(*kv_a, narrow + sizes.qk_rope_head_dim, hidden),
        Weight.same(hf + "kv_a_layernorm.weight", mc + "kv_layernorm.weight", narrow),
        Weight.rows(*kv_b, both, narrow),
        _output(layer, hidden, heads * sizes.v_head_dim),
    ]
    if (rank := sizes.q_lora_rank) is None:
        q = hf + "q_proj.weight", mc + "linear_q_proj.weight"
        return [*table, Weight.rows(*q, queries, hidden)]
    return [
        *table,
        Weight.same(hf + "q_a_proj.weight", mc + "linear_q_down_proj.weight", rank, hidden),
        Weight.same(hf + "q_a_layernorm.weight", mc + "q_layernorm.weight", rank),
        Weight.rows(hf + "q_b_proj.weight", mc + "linear_q_up_proj.weight", queries, rank),
    ]


def ignored(sizes: ModelSizes, mtp_layers: int) -> dict[str, str]:
    """Patterns of the tensors that are not loaded, with the reason: MTP layers that the plan leaves
    out, copies, and values computed from the config."""
    first = sizes.num_hidden_layers
    pattern = ".*"
    reason = "MTP layer; the plan says model.mtp: off"
    if mtp_layers:
        pattern = r"(embed_tokens|shared_head\.head)\.weight"
        reason = "a copy of the model's own"
    patterns = {
        rf"model\.layers\.{i}\.{pattern}": reason
        for i in range(first, first + sizes.num_nextn_predict_layers)
    }
    if sizes.tie_word_embeddings:
        patterns[r"lm_head\.weight"] = "a copy of the embedding"
    return patterns | {r".*\.rotary_emb\.inv_freq": "computed from the config"}
