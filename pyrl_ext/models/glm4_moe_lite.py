"""GLM-4.7-Flash (HF ``Glm4MoeLite``): multi-latent attention, dense first layers, then
sigmoid-routed experts with a selection bias and shared experts."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from pyrl_ext.models import Family
from pyrl_ext.models.weights import Weight


def _is_sparse(hf: dict) -> list[bool]:
    """[num_hidden_layers] whether a decoder layer has experts."""
    if kinds := hf.get("mlp_layer_types"):
        return [kind == "sparse" for kind in kinds]
    return [i >= hf.get("first_k_dense_replace", 1) for i in range(hf["num_hidden_layers"])]


def config(hf: dict) -> dict[str, Any]:
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "ffn_hidden_size": hf["intermediate_size"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        # attention
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "qk_layernorm": True,
        "rope_type": "rope",
        # experts
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "num_moe_experts": hf["n_routed_experts"],
        "moe_layer_freq": [int(sparse) for sparse in _is_sparse(hf)],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_num_groups": hf["n_group"] if hf["n_group"] > 1 else None,
        "moe_router_group_topk": hf["topk_group"] if hf["n_group"] > 1 else None,
    }


def rotary(hf: dict) -> tuple[int, float]:
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise NotImplementedError(
            f"glm4_moe_lite: rope_parameters.rope_type is {rope['rope_type']!r}, expected "
            "'default'; scaled rotary embeddings are not built for this family"
        )
    return hf["qk_rope_head_dim"], float(rope.get("rope_theta", 10000.0))


def weights(hf: dict) -> list[Weight]:
    table = [Weight.vocab("model.embed_tokens.weight", "embedding.word_embeddings.weight")]
    for layer, sparse in enumerate(_is_sparse(hf)):
        table += _attention(layer, has_q_lora=hf["q_lora_rank"] is not None)
        table += _experts(layer, hf["n_routed_experts"]) if sparse else _mlp(layer, "mlp", "mlp")
    table.append(Weight.same("model.norm.weight", "decoder.final_layernorm.weight"))
    table.append(Weight.vocab("lm_head.weight", "output_layer.weight"))
    return table


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


def _mlp(layer: int, hf_name: str, mc_name: str, expert: int | None = None) -> list[Weight]:
    hf, mc = f"model.layers.{layer}.{hf_name}.", f"decoder.layers.{layer}.{mc_name}."
    gate, up, down = (f"{hf}{name}_proj.weight" for name in ("gate", "up", "down"))
    return [
        Weight.gated(gate, up, mc + "linear_fc1.weight", expert),
        Weight.columns(down, mc + "linear_fc2.weight", expert),
    ]


def _experts(layer: int, num_experts: int) -> list[Weight]:
    hf, mc = f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    table = [
        Weight.same(hf + "gate.weight", mc + "router.weight"),
        Weight.same(hf + "gate.e_score_correction_bias", mc + "router.expert_bias"),
    ]
    for e in range(num_experts):
        table += _mlp(layer, f"mlp.experts.{e}", f"mlp.experts.local_experts.{e}", expert=e)
    return table + _mlp(layer, "mlp.shared_experts", "mlp.shared_experts")


def ignored(hf: dict) -> dict[str, str]:
    first = hf["num_hidden_layers"]
    return {
        rf"model\.layers\.{i}\..*": "multi-token prediction layer; the plan says model.mtp: off"
        for i in range(first, first + hf.get("num_nextn_predict_layers", 0))
    }


FAMILY = Family(config=config, rotary=rotary, weights=weights, ignored=ignored)
