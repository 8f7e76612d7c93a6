"""The plan as megatron-core's TransformerConfig."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pyrl_ext.megatron.te import te_fields
from pyrl_ext.ops import squared
from pyrl_ext.ops.tensors import dtype_of
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.chunks import SPLIT_WAYS
from pyrl_ext.plan.model.towers import Tower

# by their names in HF configs
ACTIVATIONS = {"silu": F.silu, "relu2": squared}

# Fields of megatron's config that the local backend requires: it has no fused kernels.
LOCAL_FIELDS = {
    "transformer_impl": "local",
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,  # checked with megatron's own; then `decoder_spec` has ours
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}


def transformer_config(plan: Plan, topo: Topology) -> Any:
    """megatron's config from the family, the plan, and the needs of packed RL training."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    family_config = plan.sizes.megatron_config()
    family_config["activation_func"] = ACTIVATIONS[family_config["activation_func"]]
    latent = family_config.get("multi_latent_attention", False)
    settings = dict(
        **family_config,
        **_common(plan, topo),
        virtual_pipeline_model_parallel_size=topo.vpp_size,
        **{name: getattr(plan.parallel, name) for name in SPLIT_WAYS},
        mtp_num_layers=plan.num_mtp_layers or None,
        mtp_detach_heads=plan.objective.mtp_detach,
        context_parallel_size=topo.cp_size,
        expert_model_parallel_size=topo.ep_size,
        expert_tensor_parallel_size=topo.etp_size,
        sequence_parallel=topo.tp_size > 1,  # megatron's MoE with tp needs it
        # interleaved stages: with batched p2p and two stages, both neighbours are one rank and
        # megatron-core 0.19.2 mixes up their messages
        overlap_p2p_comm=topo.vpp_size is not None,
        batch_p2p_comm=topo.vpp_size is None,
        normalization="RMSNorm",
        add_bias_linear=False,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_router_bias_update_rate=plan.model.router_bias_update_rate,
        moe_router_fusion=False,  # a fused router returns before the replay hook
    )
    config = (MLATransformerConfig if latent else TransformerConfig)(
        # the plan's rules refuse fields that the trainer sets
        **settings | te_fields(plan) | plan.model.megatron
    )
    if "moe_act" in plan.recomputed_modules:
        # megatron refuses it without its own grouped experts; ours read it here
        config.recompute_modules = [*(config.recompute_modules or ()), "moe_act"]
    return config


def tower_config(plan: Plan, topo: Topology, tower: Tower, epsilon: float) -> Any:
    """megatron's config of a vision tower's layers. Tensor-parallel ranks share no rows: images are
    not padded to a multiple of them."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    first = tower.stages(topo.pp_size)[0] if topo.pp_size > 1 else None
    return TransformerConfig(
        **_common(plan, topo),
        num_layers=tower.num_hidden_layers,
        num_layers_in_first_pipeline_stage=first,
        hidden_size=tower.hidden_size,
        num_attention_heads=tower.num_attention_heads,
        ffn_hidden_size=tower.intermediate_size,
        activation_func=partial(F.gelu, approximate="tanh"),
        layernorm_epsilon=epsilon,
        add_qkv_bias=True,
    )


def _common(plan: Plan, topo: Topology) -> dict[str, Any]:
    """Settings of the language model and of towers."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    dtype = dtype_of(plan.model.dtype)
    return dict(
        **_recompute(plan),
        tensor_model_parallel_size=topo.tp_size,
        pipeline_model_parallel_size=topo.pp_size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        batch_p2p_sync=False,  # waits for the device, for the sake of old versions of torch
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        variable_seq_lengths=True,  # microbatches differ in length
        moe_token_dispatcher_type="alltoall",  # asked for with the line above, experts or not
        calculate_per_token_loss=True,  # one division by the minibatch's token count
        finalize_model_grads_func=finalize_model_grads,
        perform_initialization=False,  # weights come from a checkpoint or from RandomWeights
        use_cpu_initialization=topo.device.type == "cpu",
        **LOCAL_FIELDS,
    )


def _recompute(plan: Plan) -> dict[str, Any]:
    choice = plan.model.recompute
    if choice == "none":
        return {}
    if choice == "selective":
        modules = sorted(plan.recomputed_modules - {"moe_act"})
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
