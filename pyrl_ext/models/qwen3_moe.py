"""Qwen3-MoE (HF ``Qwen3Moe``): grouped-query attention with a norm on each query and key head,
softmax-routed experts, and dense layers wherever the config puts them."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, common_config
from pyrl_ext.models.weights import Weight, language_model, mlp, routed_experts
from pyrl_ext.plan.families.qwen3_moe import Qwen3Moe


def config(shape: Qwen3Moe) -> dict[str, Any]:
    return common_config(shape) | {
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_width,
        "moe_router_score_function": "softmax",
        # normalizing the chosen experts' probabilities is the softmax of their logits alone
        "moe_router_pre_softmax": not shape.norm_topk_prob,
    }


def rotary(shape: Qwen3Moe) -> tuple[int, float]:
    return shape.head_width, shape.rope_base


def weights(shape: Qwen3Moe, _mtp_layers: int) -> list[Weight]:
    sparse = shape.router_layers
    return language_model(
        shape.tie_word_embeddings,
        (
            _attention(i, shape)
            + (routed_experts(i, shape.num_experts) if i in sparse else mlp(i, "mlp", "mlp"))
            for i in range(shape.num_hidden_layers)
        ),
    )


def _attention(layer: int, shape: Qwen3Moe) -> list[Weight]:
    hf, mc = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    theirs, ours = hf + "self_attn.", mc + "self_attention."
    q, k, v = (f"{theirs}{name}_proj.weight" for name in "qkv")
    heads = (shape.num_attention_heads, shape.num_key_value_heads)
    return [
        Weight.same(hf + "input_layernorm.weight", mc + "input_layernorm.weight"),
        Weight.grouped(q, k, v, ours + "linear_qkv.weight", heads),
        Weight.same(theirs + "q_norm.weight", ours + "q_layernorm.weight"),
        Weight.same(theirs + "k_norm.weight", ours + "k_layernorm.weight"),
        Weight.columns(theirs + "o_proj.weight", ours + "linear_proj.weight"),
        Weight.same(hf + "post_attention_layernorm.weight", mc + "pre_mlp_layernorm.weight"),
    ]


def ignored(shape: Qwen3Moe, _mtp_layers: int) -> dict[str, str]:
    return {}


FAMILY = Family(config=config, rotary=rotary, weights=weights, ignored=ignored)
