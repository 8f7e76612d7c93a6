"""The plan as megatron-core's TransformerConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pyrl_ext.dist.topology import Topology
from pyrl_ext.megatron.spec_local import LOCAL_FIELDS
from pyrl_ext.ops.dtypes import dtype_of
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.chunks import SPLIT_WAYS


def transformer_config(plan: Plan, topo: Topology, family_config: Mapping[str, Any]) -> Any:
    """megatron's config from the family, the plan, and the needs of packed RL training."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dtype = dtype_of(plan.model.dtype)
    latent = family_config.get("multi_latent_attention", False)
    settings = dict(
        **family_config,
        **_recompute(plan.model.recompute),
        tensor_model_parallel_size=topo.tp_size,
        pipeline_model_parallel_size=topo.pp_size,
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        variable_seq_lengths=True,  # microbatches differ in length
        calculate_per_token_loss=True,  # one division by the minibatch's token count
        finalize_model_grads_func=finalize_model_grads,
        perform_initialization=False,  # weights come from a checkpoint or from RandomWeights
        use_cpu_initialization=topo.device.type == "cpu",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_router_bias_update_rate=plan.model.router_bias_update_rate,
        moe_token_dispatcher_type="alltoall",
        moe_router_fusion=False,  # a fused router returns before the replay hook
        **LOCAL_FIELDS,
    )
    return (MLATransformerConfig if latent else TransformerConfig)(
        **settings | plan.model.megatron  # the plan's rules refuse fields that the trainer sets
    )


def _recompute(choice: str) -> dict[str, Any]:
    if choice == "none":
        return {}
    if choice == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
