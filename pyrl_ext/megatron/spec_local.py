"""Layer specs of megatron-core's local backend, with this package's attention and norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F

# Fields of megatron's config that this spec requires: it has no fused kernels.
LOCAL_FIELDS = {
    "transformer_impl": "local",
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,  # checked with megatron's own; then `local_spec` has ours
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}


def local_spec(config: Any, vp_stage: int | None, pp_rank: int) -> Any:
    """megatron's decoder block spec with the layers that packed sequences and features need."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import mlp

    from pyrl_ext.megatron.image_features import FeatureLayer
    from pyrl_ext.megatron.local_layers import CentredNorm, RMSNorm, gated_unit

    # the function that megatron's MLP calls for a fused SwiGLU
    mlp.bias_swiglu_impl = gated_unit  # type: ignore[assignment]
    config.bias_activation_fusion = config.gated_linear_unit and config.activation_func is F.silu

    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization="RMSNorm",
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    for layer in spec.layer_specs:  # type: ignore[union-attr]
        layer.module = FeatureLayer
        _fit(layer, config)
    spec.layer_norm = CentredNorm if config.layernorm_zero_centered_gamma else RMSNorm
    return spec


def local_mtp_spec(config: Any, vp_stage: int | None) -> Any:
    """The MTP layers of this model chunk, each a decoder layer with experts; None without any."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from pyrl_ext.megatron import mtp
    from pyrl_ext.megatron.local_layers import CentredNorm, RMSNorm

    if not mtp.layers_here(config, vp_stage):
        return None
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    _fit(layer, config)
    norm = CentredNorm if config.layernorm_zero_centered_gamma else RMSNorm
    return mtp.block_spec(layer, config.mtp_num_layers, norm=norm, linear=ColumnParallelLinear)


def _fit(layer: Any, config: Any) -> None:
    """Replace the layers of one layer spec that do not support packed sequences."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from pyrl_ext.megatron.expert_rows import RowMoELayer
    from pyrl_ext.megatron.grouped_experts import GroupedExperts
    from pyrl_ext.megatron.local_layers import (
        CentredNorm,
        CentredResidualNorm,
        GatedAttention,
        LatentAttention,
        ReplicatedLinear,
        ResidualNorm,
        RMSNorm,
        TurnedAttention,
    )
    from pyrl_ext.megatron.packed_attention import PackedAttention

    parts = layer.submodules
    centred = config.layernorm_zero_centered_gamma
    if getattr(parts.mlp, "func", None) is MoELayer:
        parts.mlp.keywords["submodules"].experts = GroupedExperts
        parts.mlp = partial(RowMoELayer, **parts.mlp.keywords)
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        # megatron tests for TELinear to see whether a down projection is replicated; without
        # TransformerEngine that name is None, so it is set to our replicated linear
        multi_latent_attention.TELinear = ReplicatedLinear  # type: ignore[attr-defined]
        parts.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    else:
        gated = config.attention_output_gate
        parts.self_attention.module = GatedAttention if gated else TurnedAttention
        if config.qk_layernorm:
            norm = CentredNorm if centred else RMSNorm
            attention.q_layernorm = attention.k_layernorm = norm
    norm = CentredResidualNorm if centred else ResidualNorm
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
