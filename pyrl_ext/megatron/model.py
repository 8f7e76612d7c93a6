"""Build megatron's GPTModel for packed sequences: config, spec, wrapping."""

from __future__ import annotations

from torch.nn import Module

from pyrl_ext.megatron.config import transformer_config
from pyrl_ext.megatron.te import use_kernels
from pyrl_ext.parallel.suppress_warnings import quiet
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan


def build_chunks(plan: Plan, topo: Topology) -> list[Module]:
    """This rank's model chunks (one, or one a virtual pipeline stage), in the plan's dtype."""
    from megatron.core.transformer.module import Float16Module

    from pyrl_ext.megatron.image_features import FeatureGPT
    from pyrl_ext.megatron.mtp import MultiTokenGPT
    from pyrl_ext.megatron.spec import decoder_spec, mtp_spec
    from pyrl_ext.megatron.state_layers import put_kinds

    sizes = plan.sizes
    if reasons := sizes.unsupported():
        raise NotImplementedError(f"model.config: {reasons[0]}")
    use_kernels(plan.model.backend)
    stages = [None] if topo.vpp_size is None else list(range(topo.vpp_size))
    chunks: list[Module] = []
    with quiet():
        config = transformer_config(plan, topo)
        for stage in stages:
            block = decoder_spec(config, stage, topo.pp_rank)
            put_kinds(block, sizes, plan.stages[topo.pp_rank][stage or 0].layers)
            chunk = (MultiTokenGPT if plan.num_mtp_layers else FeatureGPT)(
                config,
                block,
                mtp_block_spec=mtp_spec(config, stage),
                vocab_size=plan.vocab_columns * topo.tp_size,
                max_sequence_length=sizes.max_position_embeddings,
                pre_process=topo.is_first_stage and stage in (None, 0),
                post_process=topo.is_last_stage and stage in (None, stages[-1]),
                share_embeddings_and_output_weights=sizes.tie_word_embeddings,
                position_embedding_type="rope" if sizes.rotary_width else "none",
                pg_collection=topo.groups,
                vp_stage=stage,
            )
            _finish(chunk, plan, topo)
            chunk = chunk.to(topo.device)
            chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    return chunks


def _finish(chunk: Module, plan: Plan, topo: Topology) -> None:
    """Hand the built layers what megatron does not pass through its specs."""
    from pyrl_ext.megatron.local_layers import LatentAttention, ReplicatedLinear, TurnedAttention
    from pyrl_ext.megatron.rotary import PackedRotary

    sizes = plan.sizes
    latents = plan.gathers_latents
    rotary = PackedRotary(
        sizes.rotary_width, sizes.rope_base, topo.device, sizes.rope_scaling, sizes.rope_sections
    )
    for module in chunk.modules():
        if hasattr(module, "rotary_pos_emb"):  # the model, or with latent attention every layer
            module.rotary_pos_emb = rotary
        elif isinstance(module, ReplicatedLinear):
            module.tp_group = topo.groups.tp
        elif isinstance(module, TurnedAttention):
            module.rotary = rotary
        if isinstance(module, LatentAttention):
            module.gathers_latents = latents
