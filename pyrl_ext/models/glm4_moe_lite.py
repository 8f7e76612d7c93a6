"""GLM-4.7-Flash (HF ``Glm4MoeLite``): multi-latent attention, dense first layers, then
sigmoid-routed experts with a selection bias and shared experts."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, common_config
from pyrl_ext.models.weights import Weight, language_model, mlp, routed_experts
from pyrl_ext.plan.families.glm4_moe_lite import Glm4MoeLite


def config(shape: Glm4MoeLite) -> dict[str, Any]:
    grouped = shape.n_group > 1
    return common_config(shape) | {
        "multi_latent_attention": True,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_head_dim": shape.qk_nope_head_dim,
        "qk_pos_emb_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "rope_type": "rope",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": shape.routed_scaling_factor,
        "moe_router_num_groups": shape.n_group if grouped else None,
        "moe_router_group_topk": shape.topk_group if grouped else None,
    }


def rotary(shape: Glm4MoeLite) -> tuple[int, float]:
    return shape.qk_rope_head_dim, shape.rope_base


def weights(shape: Glm4MoeLite, mtp_layers: int) -> list[Weight]:
    decoder = shape.num_hidden_layers
    sparse = {*shape.router_layers, *range(decoder, decoder + mtp_layers)}
    layers = (
        _attention(i, shape.q_lora_rank is not None)
        + (_experts(i, shape) if i in sparse else mlp(i, "mlp", "mlp"))
        for i in range(decoder + mtp_layers)
    )
    table = language_model(shape.tie_word_embeddings, layers)
    return table + [row for i in range(mtp_layers) for row in _ahead(i, decoder + i)]


def _ahead(depth: int, layer: int) -> list[Weight]:
    """What a layer for multi-token prediction has beside a decoder layer."""
    hf, mc = f"model.layers.{layer}.", f"mtp.layers.{depth}."
    return [
        Weight.same(hf + "enorm.weight", mc + "enorm.weight"),
        Weight.same(hf + "hnorm.weight", mc + "hnorm.weight"),
        Weight.rows(hf + "eh_proj.weight", mc + "eh_proj.weight"),
        Weight.same(hf + "shared_head.norm.weight", mc + "final_layernorm.weight"),
    ]


def _attention(layer: int, has_q_lora: bool) -> list[Weight]:
    hf, mc = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    theirs, ours = hf + "self_attn.", mc + "self_attention."
    table = [
        Weight.same(hf + "input_layernorm.weight", mc + "input_layernorm.weight"),
        Weight.same(theirs + "kv_a_proj_with_mqa.weight", ours + "linear_kv_down_proj.weight"),
        Weight.same(theirs + "kv_a_layernorm.weight", ours + "kv_layernorm.weight"),
        Weight.rows(theirs + "kv_b_proj.weight", ours + "linear_kv_up_proj.weight"),
        Weight.columns(theirs + "o_proj.weight", ours + "linear_proj.weight"),
        Weight.same(hf + "post_attention_layernorm.weight", mc + "pre_mlp_layernorm.weight"),
    ]
    if not has_q_lora:
        return [*table, Weight.rows(theirs + "q_proj.weight", ours + "linear_q_proj.weight")]
    return [
        *table,
        Weight.same(theirs + "q_a_proj.weight", ours + "linear_q_down_proj.weight"),
        Weight.same(theirs + "q_a_layernorm.weight", ours + "q_layernorm.weight"),
        Weight.rows(theirs + "q_b_proj.weight", ours + "linear_q_up_proj.weight"),
    ]


def _experts(layer: int, shape: Glm4MoeLite) -> list[Weight]:
    gate, router = f"model.layers.{layer}.mlp.gate", f"decoder.layers.{layer}.mlp.router"
    table = routed_experts(layer, shape.num_experts)
    table.append(Weight.same(gate + ".e_score_correction_bias", router + ".expert_bias"))
    if shape.n_shared_experts:
        table += mlp(layer, "mlp.shared_experts", "mlp.shared_experts")
    return table


def ignored(shape: Glm4MoeLite, mtp_layers: int) -> dict[str, str]:
    first = shape.num_hidden_layers
    what, why = ".*", "multi-token prediction layer; the plan says model.mtp: off"
    if mtp_layers:
        what, why = r"(embed_tokens|shared_head\.head)\.weight", "a copy of the model's own"
    return {
        rf"model\.layers\.{i}\.{what}": why
        for i in range(first, first + shape.num_nextn_predict_layers)
    }


FAMILY = Family(config=config, rotary=rotary, weights=weights, ignored=ignored)
