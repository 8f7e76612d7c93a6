"""Layers of the local backend that megatron-core takes from TransformerEngine otherwise."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.typed_torch import apply_module
from torch import Tensor

from pyrl_ext.megatron.packed_attention import PackedSequences, gather_over
from pyrl_ext.megatron.rotary import PackedRotary
from pyrl_ext.ops import latent_keys, rms_norm, rms_norm_residual, rotary, swiglu


class RMSNorm(torch.nn.RMSNorm):
    """One kernel each way, which torch computes in pieces on a CPU. megatron's ``WrappedTorchNorm``
    refuses sequence parallelism; here the weight has the mark that its gradient must be summed over
    the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        return rms_norm(x, self.weight, self.eps)  # type: ignore[arg-type]


class ResidualNorm(RMSNorm):
    """The norm of a layer's input, and the input, which a layer of megatron then adds its output
    to: the gradients of both are added by the norm's kernel."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_residual(x, self.weight, self.eps)  # type: ignore[arg-type]


class CentredNorm(RMSNorm):
    """It multiplies by 1 + weight. That sum is in float32, and so are the rows: of a small weight
    added to 1, bfloat16 would keep little."""

    def forward(self, x: Tensor) -> Any:
        return rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)  # type: ignore[arg-type]


class CentredResidualNorm(CentredNorm):
    """`ResidualNorm`, multiplying by 1 + weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = rms_norm_residual(x.float(), 1 + self.weight.float(), self.eps)  # type: ignore[arg-type]
        return tuple(output.to(x.dtype) for output in outputs)


def sharded_weight(
    module: torch.nn.Module, group: Any, prefix: str, offsets: tuple, metadata: dict | None
) -> dict[str, Any]:
    """The weight of a module, of which every rank of ``group`` has some rows, for a distributed
    checkpoint; the other arguments are those of megatron's `sharded_state_dict`."""
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        {"weight": 0},
        offsets,
        tp_group=group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )


class TurnedAttention(SelfAttention):
    """megatron's self-attention; queries and keys are turned in one pass, by cosines and sines that
    all layers of a microbatch share, instead of the angles that megatron hands over."""

    rotary: PackedRotary  # set by model.build
    _packed: Any = None  # of the call

    def forward(  # type: ignore[override]
        self, *args: Any, packed_seq_params: Any, rotary_pos_emb: Any = None, **more: Any
    ) -> Any:
        self._packed = packed_seq_params
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **more)
        finally:
            self._packed = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        found: Any = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, *more = found  # values, and gates of the output
        query, key = self._normed(query, key)
        turns = self.rotary.turns(self._packed)
        query, key = rotary(query.squeeze(1), key.squeeze(1), turns)
        return query[:, None], key[:, None], *more

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before they are turned; megatron has normalized each head."""
        return query, key


class GatedAttention(TurnedAttention):
    """Attention whose output is gated by further outputs of the query projection. megatron's
    product is compiled, on a CPU too, and again whenever microbatches differ in length."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


class LatentAttention(MLASelfAttention):
    """Multi-latent attention of the parts that its spec names, on packed sequences.

    Under context parallelism it gathers the latents of keys and values with the rotated key that
    all heads share, and projects them to keys and values afterwards: kv_lora_rank +
    qk_rope_head_dim numbers a token instead of heads * (query width + value width). megatron-core
    0.19.2 projects first, and its core attention gathers what all heads have. Gathering and
    projecting belong to core attention here, so that selective recomputation keeps this rank's
    latents, and not the keys and values of all ranks.

    Communicates: all-gather of the rank's sequence shard of the latents over the microbatch's
        context-parallel group, then over the tensor-parallel group (in ``linear_kv_up_proj``);
        reduce-scatter of their gradients.
    """

    gathers_latents = False  # set by model.build; False: as megatron does

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """The parts as the spec gives them. megatron-core 0.19.2 refuses a norm of keys and values
        alone, which models without compressed queries have."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*names, "q_layernorm", "kv_layernorm")}

    def get_query_key_value_tensors(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Queries, keys and values, and the compressed queries, keys and values.

        Returns:
            query [T_local, heads, D]; then, in the place of keys and values, what
            `_keys_and_values` makes them of: all heads' parts [T_local, heads, D' + V] and the
            rotated key [T_local, qk_rope_head_dim]; or, if latents are gathered, this sequence
            shard's latents [T_local / tp, kv_lora_rank] and rotated key.
        """
        packed: PackedSequences = packed_seq_params
        compressed, combined = self._qkv_down_projection(hidden_states)
        compressed = compressed.squeeze(1)
        combined = combined.squeeze(1)
        latents, shared = combined.split([self.config.kv_lora_rank, self._rotary_width], dim=-1)
        latents = apply_module(self.kv_layernorm)(latents)
        narrow = self.config.q_lora_rank is not None
        if narrow:
            compressed = apply_module(self.q_layernorm)(compressed)
        query, _ = (self.linear_q_up_proj if narrow else self.linear_q_proj)(compressed)
        query = query.unflatten(-1, (self.num_attention_heads_per_partition, self.q_head_dim))
        turns: Any = self.rotary_pos_emb
        turns = turns.turns(packed)
        shared = shared[:, None]
        if not self._gathers(packed):
            if self.config.sequence_parallel:
                shared = gather_over(self.tp_group, shared)
            query, shared = _turn(query, shared, turns)
            both, _ = self.linear_kv_up_proj(latents)
            return query, self._by_head(both), shared.squeeze(1), compressed, latents
        if self.config.sequence_parallel:
            query = _turn(query, query[:, :0], turns)[0]
            of_shard = packed.layout.shard(turns, packed.place.tp_rank)
            shared = _turn(shared[:, :0], shared, of_shard)[1]
        else:
            query, shared = _turn(query, shared, turns)
        return query, latents, shared.squeeze(1), compressed, latents

    def _run_core_attention(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        packed_seq_params: Any = None,
        attn_mask_type: Any = None,
        **extra: Any,
    ) -> Tensor:
        """Core attention; ``key`` and ``value`` are what `get_query_key_value_tensors` returned.
        megatron's would pad narrow values here, before context parallelism gathers them; core
        attention does where its kernel needs it."""
        key, value = self._keys_and_values(key, value, packed_seq_params)
        if self._gathers(packed_seq_params):
            extra["chunks"] = packed_seq_params.over_shards
        return self.core_attention(
            query,
            key,
            value,
            attention_mask,
            packed_seq_params=packed_seq_params,
            attn_mask_type=attn_mask_type or self.attn_mask_type,
            **extra,
        )

    def _keys_and_values(
        self, both: Tensor, shared: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor]:
        """Keys [T_local, heads, D], and values; with gathered latents those of cp * T_local rows,
        in the order of `PackedSequences.over_shards`."""
        if self._gathers(packed):
            widths = [self.config.kv_lora_rank, self._rotary_width]
            gathered = gather_over(packed.place.cp_group, torch.cat([both, shared], dim=-1))
            latents, shared = gathered.split(widths, dim=-1)
            heads, _ = self.linear_kv_up_proj(latents.contiguous())
            if self.config.sequence_parallel:
                shared = gather_over(self.tp_group, shared)
            both = self._by_head(heads)
        return latent_keys(both, shared, self.config.qk_head_dim)

    def _by_head(self, both: Tensor) -> Tensor:
        wide = self.config.qk_head_dim + self.config.v_head_dim
        return both.unflatten(-1, (self.num_attention_heads_per_partition, wide))

    @property
    def _rotary_width(self) -> int:
        return self.config.qk_pos_emb_head_dim

    def _gathers(self, packed: PackedSequences) -> bool:
        return self.gathers_latents and packed.place.cp_group is not None


def gated_unit(gate_up: Tensor, bias: None, *_: bool) -> Tensor:
    """[..., 2 W] -> silu(gate) * up [..., W], by one kernel."""
    return swiglu(gate_up.flatten(0, -2), None).unflatten(0, gate_up.shape[:-1])


def _turn(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """The last elements of heads turned: pairs of neighbours, which come out in halves."""
    return rotary(query, key, turns, last=True, source="neighbours", result="halves")


class ReplicatedLinear(MegatronModule):
    """y = x W^T with the same W on every tensor-parallel rank, on the rank's shard of the sequence.

    What TELinear(parallel_mode="duplicated") is to the TE spec. megatron's local spec has
    column-parallel down projections in multi-latent attention instead, and then the rotary key's
    gradient is not summed over tensor-parallel ranks (off by 9e-3 of its maximum).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        **_: Any,
    ):
        super().__init__(config=config)
        self.gradient_accumulation_fusion = False  # set by `wrap_ddp`
        self.tp_group: Any = None  # set by model.build; megatron passes none to a replicated linear
        device = torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.allreduce = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        fused = self.gradient_accumulation_fusion
        linear = linear_with_frozen_weight
        if self.weight.requires_grad:
            linear = linear_with_grad_accumulation_and_async_allreduce
        return linear(x, self.weight, None, fused, False, False, tp_group=self.tp_group), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
