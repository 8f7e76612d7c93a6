"""A tiny mixture-of-experts GPT on CPU ranks, in SkyRL's `MegatronModelWrapper`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from pyrl_ext.megatron import cpu
from pyrl_ext.megatron.local_layers import RMSNorm
from tests.helpers.megatron_groups import destroy_groups

VOCAB = 64
EXPERTS = 8
TOPK = 2


class CausalAttention(nn.Module):
    """Core attention in formulas: megatron-core has none for packed sequences on a CPU."""

    def __init__(self, config: Any, *args: Any, pg_collection: Any, **kwargs: Any):
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
        """[T, heads, d] each, or [S, B, heads, d] without packing -> the same, heads joined."""
        packed = more["packed_seq_params"]
        if packed is None:
            places = torch.arange(len(query))[:, None].expand(-1, 2) * torch.tensor([0, 1])
            return _attend(query, key, value, places, places, self.scale).flatten(2)
        ranks = self.group.size()
        all_places = [zigzag(packed.cu_seqlens_q_padded.tolist(), r, ranks) for r in range(ranks)]
        if ranks > 1:
            key, value = (all_gather_tensor_autograd(x, 0, self.group) for x in (key, value))
        mine = all_places[self.group.rank()]
        one = query[:, None], key[:, None], value[:, None]
        return _attend(*one, mine, torch.cat(all_places), self.scale)[:, 0].flatten(1)


def zigzag(ends: list[int], rank: int, ranks: int) -> Tensor:
    """[T / ranks, 2] (sequence, position in it) of the rows of a context-parallel rank."""
    places = list[tuple[int, int]]()
    for number, (start, end) in enumerate(pairwise(ends)):
        chunk = (end - start) // (2 * ranks)
        for part in (rank, 2 * ranks - 1 - rank):
            places += [(number, position) for position in range(part * chunk, (part + 1) * chunk)]
        if ranks == 1 and (end - start) % 2:
            places.append((number, end - start - 1))
    return torch.tensor(places)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, at_q: Tensor, at_k: Tensor, scale: float
) -> Tensor:
    """[Q, B, heads, d], [K, B, heads, d] twice; a query sees its sequence up to its position."""
    mask = (at_q[:, None, 0] == at_k[:, 0]) & (at_q[:, None, 1] >= at_k[:, 1])
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return out.permute(2, 0, 1, 3)


def initialize(**sizes: Any) -> None:
    """megatron's parallel state over gloo."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    cpu.install()
    torch.compiler.set_stance("force_eager")  # SkyRL compiles a sum of products, for 20 s
    destroy_groups()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(7)


def build(
    layers: int, dense: int = 1, mtp: int = 0, vpp: int | None = None, **fields: Any
) -> list[nn.Module]:
    """This rank's chunks: ``dense`` layers, then layers of experts, then ``mtp`` of them that
    predict further tokens."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import TransformerConfig

    pp_size = mpu.get_pipeline_model_parallel_world_size()
    tp_size = mpu.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=16,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_layer_freq=[0] * dense + [1] * (layers - dense),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
        mtp_num_layers=mtp or None,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=mpu.get_context_parallel_world_size(),
        sequence_parallel=tp_size > 1,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        variable_seq_lengths=vpp is None,  # over gloo virtual stages cannot tell shapes apart
        use_cpu_initialization=True,
        **fields,
    )
    chunks = list[nn.Module]()
    for stage in range(vpp or 1):
        at = None if vpp is None else stage
        spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=at)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        spec.layer_norm = RMSNorm
        more: Any = None
        if mtp:
            more = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        chunk = GPTModel(
            config,
            spec,
            VOCAB,
            256,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=vpp is None, vp_stage=at),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=vpp is None, vp_stage=at),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=more,
            vp_stage=at,
        )
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(), chunk))
    return chunks


# SkyRL around it ----------------------------------------------------------------------------------

MICROBATCHES = 2
SAMPLES = 3
LENGTH = 10
LAYERS = 4
ACTIONS = 4


def wrapper(chunks: list[nn.Module], packed: bool, fused: bool = False) -> Any:
    """SkyRL's `MegatronModelWrapper`, with PPO's loss and an entropy term unless ``fused``."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper
    from skyrl.train.config import TrainerConfig

    config = TrainerConfig()
    config.remove_microbatch_padding = packed
    config.fused_lm_head_logprob = fused
    config.logprobs_chunk_size = 4
    config.algorithm.use_entropy_loss = not fused
    loss = PolicyLossRegistry.get("regular")
    return megatron_model_wrapper.MegatronModelWrapper(config, chunks, None, loss)


def table(layers: int = LAYERS) -> Tensor:
    """[L, VOCAB, K] int32, the experts of each token id: no two ids have the same ones."""
    g = torch.Generator().manual_seed(3)
    return torch.rand(layers, VOCAB, EXPERTS, generator=g).argsort(-1)[..., :TOPK].int()


def microbatches(
    left: bool, layers: int = LAYERS, samples: int = SAMPLES, unrouted: int = VOCAB
) -> list[dict[str, Any]]:
    """As SkyRL's worker makes them. Token ids are unique, from 1; padding has 0.

    Args:
        left: padding is on the left.
        unrouted: tokens whose id is a multiple of it have no route, which SkyRL fills with 0.
    """
    g = torch.Generator().manual_seed(1)
    batches = list[dict[str, Any]]()
    for number in range(MICROBATCHES):
        lengths = torch.randint(ACTIONS + 1, LENGTH + 1, (samples,), generator=g)
        lengths[number % samples] = LENGTH
        column = torch.arange(LENGTH)
        mask = column < lengths[:, None]
        mask = mask.flip(1) if left else mask
        ids = 1 + torch.arange(samples * LENGTH).view(samples, LENGTH) + number * samples * LENGTH
        ids = ids * mask
        values = torch.rand(4, samples, ACTIONS, generator=g)
        routed = (ids % unrouted != 0)[..., None, None]
        routes = table(layers)[:, ids].permute(1, 2, 0, 3) * routed
        batches.append(
            {
                "sequences": ids,
                "attention_mask": mask.long(),
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "num_actions": ACTIONS,
                "old_action_log_probs": -4 - values[0],
                "base_action_log_probs": -4 - values[1],
                "advantages": values[2] - 0.5,
                "loss_mask": mask[:, -ACTIONS:].float(),
                "rollout_action_logprobs": -4 - values[3],
                "rollout_expert_indices": routes.contiguous(),
                "num_microbatches": MICROBATCHES,
                "num_real_microbatches": MICROBATCHES,
            }
        )
    return batches


class Routed:
    """The experts that every router used, and the token ids of its rows, by forward."""

    def __init__(self, chunks: list[nn.Module]):
        from megatron.core.transformer.moe.router import TopKRouter

        self.maps = dict[tuple[int, bool], list[Tensor]]()  # (0-based layer, MTP) -> [M, E] each
        self.ids = list[Tensor]()  # [B, S] each, on the first stage
        for name, module in (pair for chunk in chunks for pair in chunk.named_modules()):
            if isinstance(module, TopKRouter):
                router: Any = module
                maps = self.maps.setdefault((router.layer_number - 1, router.is_mtp_layer), [])
                router.register_forward_hook(lambda m, a, out, maps=maps: maps.append(out[1]))
            elif name.endswith("embedding.word_embeddings"):
                module.register_forward_hook(lambda m, a, out: self.ids.append(a[0]))

    def wrong(self, layers: int, unrouted: int, mtp: int) -> list[str]:
        """Forwards in which a token has other experts than its own or a row has not ``TOPK``, in
        words; and layers that did not see all microbatches equally often.

        Communicates: the ids, from the first stage to all ranks.
        """
        from megatron.core import parallel_state as mpu

        shared: list[Any] = [self.ids[:: 1 + mtp][:MICROBATCHES]]  # MTP layers embed them again
        first = mpu.get_pipeline_model_parallel_first_rank()
        group: Any = mpu.get_pipeline_model_parallel_group()
        torch.distributed.broadcast_object_list(shared, src=first, group=group)
        tp_size = mpu.get_tensor_model_parallel_world_size()
        tp_rank = mpu.get_tensor_model_parallel_rank()
        rows = [ids.t().chunk(tp_size)[tp_rank].flatten() for ids in shared[0]]
        found = list[str]()
        for (layer, is_mtp), maps in self.maps.items():
            seen = [0] * len(rows)
            for used in maps:
                if (used.sum(1) != TOPK).any():
                    found.append(f"layer {layer}: experts twice")
                for number, ids in enumerate(rows):
                    want = torch.zeros(len(ids), EXPERTS, dtype=torch.bool)
                    want.scatter_(1, table(layers)[layer, ids].long(), True)
                    same_rows = len(used) == len(ids)
                    routed = ids % unrouted != 0
                    seen[number] += same_rows and torch.equal(used[routed], want[routed])
            if not is_mtp and (len(set(seen)) > 1 or sum(seen) < len(maps)):
                found.append(f"layer {layer}: tokens had their experts in {seen} of {len(maps)}")
        return found


def train(chunks: list[Any], run: Any, batches: Any, steps: int = 3) -> list[Any]:
    """The metrics of all microbatches of ``steps`` steps of gradient descent."""
    metrics = list[Any]()
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        each = [dict(batch) for batch in batches]
        samples = len(each[0]["sequences"])
        metrics += run.forward_backward_mini_batch(each, LENGTH, samples, temperature=0.9)
        with torch.no_grad():
            for chunk in chunks:
                for weight in chunk.parameters():
                    weight -= 0.01 * weight.main_grad
    return metrics
