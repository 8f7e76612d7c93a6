"""Build megatron's GPTModel for packed sequences: config, local spec, wrapping."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from pyrl_ext.plan.shape import Yarn
from pyrl_ext.plan.stages import SPLIT_WAYS
from pyrl_ext.topology import Topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(plan: Any, topo: Topology, family_config: Mapping[str, Any]) -> Any:
    """megatron's config: what the family and the plan say, and what packed RL training needs."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dtype = DTYPES[plan.model.dtype]
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
        moe_permute_fusion=False,
        moe_grouped_gemm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
    )
    return (MLATransformerConfig if latent else TransformerConfig)(
        **settings | plan.model.megatron  # rules see to it that nothing of the trainer's is in it
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


def local_spec(config: Any, vp_stage: int | None) -> Any:
    """megatron's decoder block spec with the parts it lacks for packed sequences."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from pyrl_ext.megatron.attention import RMSNorm

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:  # type: ignore[union-attr]
        _fit(layer, config)
    spec.layer_norm = RMSNorm
    return spec


def local_mtp_spec(config: Any, vp_stage: int | None) -> Any:
    """The layers for multi-token prediction of this model chunk, each a decoder layer with experts;
    None where there are none."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from pyrl_ext.megatron import mtp
    from pyrl_ext.megatron.attention import RMSNorm

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
    return mtp.block_spec(layer, config.mtp_num_layers, norm=RMSNorm, linear=ColumnParallelLinear)


def _fit(layer: Any, config: Any) -> None:
    """Put the parts for packed sequences into the spec of one layer."""
    from megatron.core.transformer import multi_latent_attention

    from pyrl_ext.megatron.attention import (
        LatentAttention,
        PackedAttention,
        ReplicatedLinear,
        RMSNorm,
    )

    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        # megatron asks "is this TELinear?" to see whether a down projection is replicated; without
        # TransformerEngine that name is None, and this is what stands for it
        multi_latent_attention.TELinear = ReplicatedLinear  # type: ignore[attr-defined]
        parts.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm


def build_chunks(
    plan: Any,
    topo: Topology,
    family_config: Mapping[str, Any],
    rotary: tuple[int, float, Yarn | None],
) -> list[Module]:
    """This rank's model chunks (one, or one a virtual pipeline stage), in the plan's dtype.

    Args:
        family_config: keyword arguments of the transformer config, from ``models/<family>.py``.
        rotary:        rotated dimensions per head, base of the wavelengths, stretching or None.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    from pyrl_ext.megatron.mtp import MultiTokenGPT

    if plan.model.backend != "local":
        raise NotImplementedError(
            f"model.backend: {plan.model.backend!r} is not built, expected 'local'"
        )
    shape = plan.shape
    if reasons := shape.unsupported():
        raise NotImplementedError(f"model.config: {reasons[0]}")
    stages = [None] if topo.vpp_size is None else list(range(topo.vpp_size))
    chunks: list[Module] = []
    with quiet():
        config = transformer_config(plan, topo, family_config)
        for stage in stages:
            chunk = (MultiTokenGPT if plan.num_mtp_layers else GPTModel)(
                config,
                local_spec(config, stage),
                mtp_block_spec=local_mtp_spec(config, stage),
                vocab_size=-(-shape.vocab_size // topo.tp_size) * topo.tp_size,
                max_sequence_length=shape.max_position_embeddings,
                pre_process=topo.is_first_stage and stage in (None, 0),
                post_process=topo.is_last_stage and stage in (None, stages[-1]),
                share_embeddings_and_output_weights=shape.tie_word_embeddings,
                position_embedding_type="rope",
                pg_collection=topo.groups,
                vp_stage=stage,
            )
            _finish(chunk, topo, rotary)
            chunk = chunk.to(topo.device)
            chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    return chunks


def _finish(chunk: Module, topo: Topology, rotary: tuple[int, float, Yarn | None]) -> None:
    """Hand the built layers what megatron does not pass through its specs."""
    from pyrl_ext.megatron.attention import PackedRotary, ReplicatedLinear

    width, base, yarn = rotary
    for module in chunk.modules():
        if hasattr(module, "rotary_pos_emb"):  # the model, or with latent attention every layer
            module.rotary_pos_emb = PackedRotary(width, base, topo.device, yarn)
        elif isinstance(module, ReplicatedLinear):
            module.tp_group = topo.groups.tp


def wrap_ddp(plan: Any, chunks: Sequence[Module], groups: Any) -> list[Module]:
    """megatron's DistributedDataParallel around each chunk: gradients in fp32 buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.utils import get_model_config

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=plan.optimizer.overlap_grad_reduce,
        use_distributed_optimizer=plan.optimizer.distributed,
        check_for_nan_in_grad=False,  # the optimizer's norm says it once, for all ranks
    )
    with quiet():
        wrapped: list[Any] = [
            DistributedDataParallel(
                config=get_model_config(chunk),
                ddp_config=ddp,
                module=chunk,
                disable_bucketing=i > 0,
                pg_collection=groups,
            )
            for i, chunk in enumerate(chunks)
        ]
    if ddp.overlap_grad_reduce:  # only the last microbatch's backward passes may reduce
        pauses = [chunk.no_sync for chunk in wrapped]
        get_model_config(chunks[0]).no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return wrapped


def release(chunks: Sequence[Any]) -> None:
    """Let go of wrapped chunks that nobody needs any more. megatron's wrapper and its hooks hold
    each other through autograd's nodes, where Python's collector does not look, and dispatchers
    keep the graph of their last microbatch: a process that builds several models would keep them
    all, with their process groups."""
    for chunk in chunks:
        chunk.grad_accs.clear()
        for module in chunk.modules():
            if (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
                dispatcher.probs = None


def unwrap(module: Module) -> Module:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while isinstance(inner := getattr(module, "module", None), Module):
        module = inner
    return module


class quiet:
    """Leaves out what megatron says at every build: GPTModel deprecated, no TransformerEngine."""

    def __enter__(self) -> None:
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")
        self.before = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *_: Any) -> None:
        logging.disable(self.before)
        self.caught.__exit__(None, None, None)
