"""verl's Megatron engine on a CPU: its own constructor, batches and schedules, with models that are
built here, for its bridge to Hugging Face needs GPUs, and attention without TransformerEngine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

from pyrl_ext.megatron import cpu
from pyrl_ext.megatron.local_layers import RMSNorm
from tests.helpers.megatron_groups import destroy_groups

EXPERTS = 8
TOPK = 2
VOCAB = 32


class PlatformCPU(PlatformCUDA):
    @property
    def device_name(self):
        return "cpu"

    @property
    def device_module(self):
        return torch.cpu

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def communication_backend_name(self):
        return "gloo"


set_platform(PlatformCPU())
cpu.install()
torch._dynamo.config.disable = True  # verl compiles a sum of products anew in every call

from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import McoreEngineConfig  # noqa: E402
from verl.workers.config.engine import EngineRouterReplayConfig  # noqa: E402
from verl.workers.engine.megatron import transformer_impl  # noqa: E402  asks for it at import


@contextmanager
def megatron_groups(
    tp: int = 1, pp: int = 1, cp: int = 1, vpp: int | None = None
) -> Iterator[None]:
    """megatron's global groups, as verl's engine makes them."""
    parallel_state.initialize_model_parallel(tp, pp, vpp, context_parallel_size=cp)
    try:
        yield
    finally:
        destroy_groups()


class ThdAttention(MegatronModule):
    """Causal attention of each packed sequence; values alone where rows are not packed, or split
    over context-parallel ranks."""

    def __init__(self, config: Any, *_: Any, **__: Any):
        super().__init__(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
        packed = options["packed_seq_params"]
        if packed is None or self.config.context_parallel_size > 1:
            return value.flatten(-2)
        ends = packed.cu_seqlens_q.tolist()
        sizes = [b - a for a, b in pairwise(ends)]
        each = zip(*(x.split(sizes) for x in (query, key, value)))
        outputs = [_causal(*(x.transpose(0, 1) for x in qkv)) for qkv in each]
        return torch.cat(outputs)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(0, 1).flatten(1)


def new_engine(
    mode: str = "disabled",
    layers: int = 4,
    dense: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    vpp: int | None = None,
    recompute: bool = False,
    seed: int = 0,
) -> Any:
    """verl's engine with models of random weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    hf = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
    no_mtp = SimpleNamespace(enable=False, enable_train=False)
    tokenizer = SimpleNamespace(pad_token_id=0)
    model = SimpleNamespace(hf_config=hf, mtp=no_mtp, tokenizer=tokenizer)
    model.model_type = "language_model"
    settings = McoreEngineConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=vpp,
        router_replay=EngineRouterReplayConfig(mode=mode),
    )
    engine = transformer_impl.MegatronEngineWithLMHead(model, settings, None, None)
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform"}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=16,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_layer_freq=[0] * dense + [1] * (layers - dense),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=mode != "disabled",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=vpp,
        sequence_parallel=tp > 1,
        variable_seq_lengths=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=vpp is None,
        overlap_p2p_comm=vpp is not None,
        batch_p2p_sync=False,
        **({**recomputed, "recompute_num_layers": 1} if recompute else {}),
    )
    torch.manual_seed(seed)
    engine.module = []
    for stage in [None] if vpp is None else range(vpp):
        spec: Any = get_gpt_decoder_block_spec(
            config, False, normalization="RMSNorm", vp_stage=stage
        )
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = ThdAttention
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        spec.layer_norm = RMSNorm
        ends = {"vp_stage": stage, "ignore_virtual": stage is None}
        chunk = GPTModel(
            config,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            position_embedding_type="none",
            vp_stage=stage,
        )
        engine.module.append(chunk)
    engine.tf_config = config
    return engine


def jagged(parts: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def new_batch(lengths: Sequence[int], layers: int, seed: int = 0, **settings: Any) -> Any:
    """A batch of verl's without padding; ``routed_experts`` of all layers, distinct and random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    masks = []
    routes = []
    for length in lengths:
        tokens.append(torch.randint(1, VOCAB, (length,), generator=generator))
        masks.append(torch.arange(length) >= length // 2)
        drawn = torch.rand(length, layers, EXPERTS, generator=generator)
        routes.append(drawn.argsort(-1)[..., :TOPK].to(torch.int16))
    batch = TensorDict(
        {
            "input_ids": jagged(tokens),
            "loss_mask": jagged(masks),
            "response_mask": jagged(masks),
            "routed_experts": jagged(routes),
        },
        batch_size=len(lengths),
    )
    known = {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    known |= {"calculate_entropy": True}
    tensordict_utils.assign_non_tensor(batch, **known | settings)
    return batch


def loss_of(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """The loss: log-probs and entropies at the tokens that precede a token of the response."""
    mask = data["loss_mask"].values().roll(-1)
    logprob, entropy = (model_output[name].values() for name in ("log_probs", "entropy"))
    return -(logprob + 0.1 * entropy)[mask].mean(), {}
