"""Layer specs of both backends: megatron's, with this package's attention, norms and experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import mlp, multi_latent_attention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from pyrl_ext.megatron.expert_rows import RowMoELayer
from pyrl_ext.megatron.grouped_experts import GroupedExperts
from pyrl_ext.megatron.image_features import FeatureLayer
from pyrl_ext.megatron.local_layers import (
    CentredNorm,
    CentredResidualNorm,
    GatedAttention,
    LatentAttention,
    ReplicatedLinear,
    ResidualNorm,
    RMSNorm,
    TurnedAttention,
    gated_unit,
)
from pyrl_ext.megatron.mtp import PackedMTPLayer
from pyrl_ext.megatron.packed_attention import PackedAttention


def decoder_spec(config: Any, vp_stage: int | None, pp_rank: int) -> Any:
    """megatron's decoder block spec with the layers that packed sequences and features need.

    Raises: RuntimeError if the backend is TransformerEngine and megatron cannot import it.
    """
    te = _is_te(config)
    if te and not HAVE_TE:
        raise RuntimeError(
            "model.backend: te, but megatron-core could not import transformer_engine, expected it "
            "to; megatron then silently uses its own layers. Try: python -c 'import "
            "transformer_engine.pytorch.fp8'"
        )
    if not te:
        # the function that megatron's MLP calls for a fused SwiGLU
        mlp.bias_swiglu_impl = gated_unit  # type: ignore[assignment]
        is_swiglu = config.gated_linear_unit and config.activation_func is F.silu
        config.bias_activation_fusion = is_swiglu
    spec = get_gpt_decoder_block_spec(
        config, te, normalization="RMSNorm", vp_stage=vp_stage, pp_rank=pp_rank
    )
    for layer in spec.layer_specs:  # type: ignore[union-attr]
        layer.module = FeatureLayer
        _fit(layer, config)
    if not te:
        spec.layer_norm = _norm(config)
    return spec


def mtp_spec(config: Any, vp_stage: int | None) -> Any:
    """The MTP layers of this model chunk, each a decoder layer with experts; None without any."""
    if not config.mtp_num_layers or not get_mtp_num_layers_to_build(config, vp_stage=vp_stage):
        return None
    options: dict[str, Any] = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if _is_te(config):
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(**options)
        norm: Any = TENorm
        linear: Any = TEColumnParallelLinear
    else:
        layer = get_gpt_layer_local_spec(**options, normalization="RMSNorm")
        norm = _norm(config)
        linear = ColumnParallelLinear
    _fit(layer, config)
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=linear, mtp_model_layer=layer
    )
    spec = ModuleSpec(module=PackedMTPLayer, submodules=parts)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * config.mtp_num_layers)


def _is_te(config: Any) -> bool:
    return config.transformer_impl == "transformer_engine"


def _norm(config: Any) -> type[RMSNorm]:
    return CentredNorm if config.layernorm_zero_centered_gamma else RMSNorm


def _fit(layer: Any, config: Any) -> None:
    """Replace the layers of one layer spec that do not support packed sequences."""
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = PackedAttention
    if config.multi_latent_attention:
        # takes the projections as the spec has them: megatron-core 0.19.2 would put a norm that no
        # checkpoint has before queries that are not compressed
        attention.module = LatentAttention
    if _is_te(config):
        _fit_te(attention, config)
    else:
        _fit_local(layer.submodules, config)


def _fit_te(attention: Any, config: Any) -> None:
    from megatron.core.extensions.transformer_engine import TELinear

    from pyrl_ext.megatron.te_attention import TEAttention

    if config.cp_comm_type is not None:
        attention.submodules.core_attention = TEAttention
    if config.multi_latent_attention:
        multi_latent_attention.TELinear = TELinear  # `_fit_local` puts its own class there


def _fit_local(parts: Any, config: Any) -> None:
    if getattr(parts.mlp, "func", None) is MoELayer:
        parts.mlp.keywords["submodules"].experts = GroupedExperts
        parts.mlp = partial(RowMoELayer, **parts.mlp.keywords)
    attention = parts.self_attention.submodules
    if config.multi_latent_attention:
        # megatron tests for TELinear to see whether a down projection is replicated; without
        # TransformerEngine that name is None, so it is set to our replicated linear
        multi_latent_attention.TELinear = ReplicatedLinear  # type: ignore[attr-defined]
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    else:
        gated = config.attention_output_gate
        parts.self_attention.module = GatedAttention if gated else TurnedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = _norm(config)
    centred = config.layernorm_zero_centered_gamma
    norm = CentredResidualNorm if centred else ResidualNorm
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
