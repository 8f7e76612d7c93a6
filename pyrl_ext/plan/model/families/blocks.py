"""Blocks that families share: two kinds of attention, and routers that score by sigmoid."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.sizes import ModelSizes, Sparse, Yarn
from pyrl_ext.plan.model.weight import Weight

# The epsilon of transformers' norms inside multi-latent attention, independent of rms_norm_eps.
MLA_NORM_EPS = 1e-6
Share = Annotated[float, Field(gt=0, le=1)]


class GroupedQuery(ModelSizes):
    """Attention in which groups of query heads share a key and a value head."""

    num_key_value_heads: Positive
    head_dim: Positive | None = None

    @property
    def has_qk_norm(self) -> bool:
        """True if every query and key head is normalized."""
        return True

    @property
    def head_width(self) -> int:
        """Elements of a query, key or value head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        return self.head_width

    @property
    def query_groups(self) -> int:
        return self.num_key_value_heads

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        heads = self.num_attention_heads
        groups = self.num_key_value_heads
        if heads % groups:
            found.append(
                f"num_key_value_heads {groups} does not divide num_attention_heads {heads}, "
                "expected a divisor; as many query heads share each"
            )
        return found

    def megatron_config(self) -> dict[str, Any]:
        return super().megatron_config() | {
            "num_query_groups": self.num_key_value_heads,
            "kv_channels": self.head_width,
            "qk_layernorm": self.has_qk_norm,
            "add_qkv_bias": self.attention_bias,
            "attention_output_gate": self.has_output_gate,
        }

    def attention_rows(self, layer: int) -> list[Weight]:
        hf = f"model.layers.{layer}.self_attn."
        mc = f"decoder.layers.{layer}.self_attention."
        heads = (self.num_attention_heads, self.num_key_value_heads)
        hidden = self.hidden_size
        width = self.head_width
        gates = self.has_output_gate
        shapes: dict[str, tuple[int, ...]] = {"weight": (width, hidden)}
        if self.attention_bias:
            shapes["bias"] = (width,)
        rows: list[Weight] = []
        for kind, head in shapes.items():
            q, k, v = (f"{hf}{name}_proj.{kind}" for name in "qkv")
            rows.append(
                Weight.grouped(q, k, v, f"{mc}linear_qkv.{kind}", heads, *head, gates=gates)
            )
        if self.has_qk_norm:
            rows.append(Weight.same(hf + "q_norm.weight", mc + "q_layernorm.weight", width))
            rows.append(Weight.same(hf + "k_norm.weight", mc + "k_layernorm.weight", width))
        return [*rows, _output(layer, hidden, heads[0] * width)]


class Windowed(GroupedQuery):
    """Attention that a config may limit to a window of the latest tokens, which is not built."""

    use_sliding_window: bool = False
    attention_kinds: Annotated[
        tuple[str, ...] | None, Field(strict=False, validation_alias="layer_types")
    ] = None

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        whole = "every layer attends to whole sequences"
        if self.use_sliding_window:
            found.append(f"use_sliding_window is true; {whole}")
        elif "sliding_attention" in (self.attention_kinds or ()):
            found.append(f"layer_types has sliding_attention; {whole}")
        return found


class PartlyRotated(GroupedQuery):
    """Attention that rotates a part of each query and key head by position."""

    partial_rotary_factor: Share

    @property
    def rotary_width(self) -> int:
        rope = self.rope_parameters or {}
        return int(self.head_width * rope.get("partial_rotary_factor", self.partial_rotary_factor))


class Latent(ModelSizes):
    """Multi-latent attention: keys and values, and mostly queries, go through narrow projections,
    which every tensor-parallel rank holds whole."""

    q_lora_rank: Positive | None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    rope_interleave: bool = True

    rope_types = frozenset({"default", "yarn"})

    @property
    def rotary_width(self) -> int:
        return self.qk_rope_head_dim

    @property
    def whole_widths(self) -> dict[str, int]:
        return super().whole_widths | {
            "q_lora_rank": self.q_lora_rank or 0,
            "kv_lora_rank + qk_rope_head_dim": self.kv_lora_rank + self.qk_rope_head_dim,
            "kv_lora_rank": self.kv_lora_rank,
        }

    @property
    def rope_scaling(self) -> Yarn | None:
        if self.rope_type != "yarn":
            return None
        rope = self.rope_parameters or {}
        factor = rope["factor"]
        everywhere = rope.get("mscale_all_dim") or 0
        scale = rope.get("attention_factor")
        if scale is None and (mscale := rope.get("mscale")) and everywhere:
            scale = _sharpness(factor, mscale) / _sharpness(factor, everywhere)
        return Yarn(
            factor=factor,
            original_positions=rope.get("original_max_position_embeddings")
            or self.max_position_embeddings,
            beta_fast=rope.get("beta_fast") or 32,
            beta_slow=rope.get("beta_slow") or 1,
            truncate=rope.get("truncate", True),
            rotation_scale=_sharpness(factor, 1) if scale is None else scale,
            mscale_all_dim=everywhere,
        )

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        factor = (self.rope_parameters or {}).get("factor")
        if self.rope_type == "yarn" and not isinstance(factor, int | float):
            found.append(f"rope_type yarn with factor {factor}, expected a number")
        return found

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if not self.rope_interleave:
            found.append("rope_interleave is false; neighboring elements are rotated together")
        return found

    def notes(self) -> list[str]:
        eps = (
            f"rms_norm_eps is {self.rms_norm_eps:g}; transformers computes the q_a and kv_a norms "
            f"with {MLA_NORM_EPS:g}, other engines with {self.rms_norm_eps:g}: log-probs differ "
            "by about 1e-5"
        )
        return [eps] if self.rms_norm_eps != MLA_NORM_EPS else []

    def megatron_config(self) -> dict[str, Any]:
        yarn = self.rope_scaling
        config = super().megatron_config() | {
            "multi_latent_attention": True,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_head_dim": self.qk_nope_head_dim,
            "qk_pos_emb_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "qk_layernorm": True,
            "rope_type": "yarn" if yarn else "rope",
        }
        if yarn is None:
            return config
        # these scale the attention logits; PackedRotary scales the wavelengths
        return config | {
            "rotary_scaling_factor": yarn.factor,
            "mscale_all_dim": yarn.mscale_all_dim,
        }

    def attention_rows(self, layer: int) -> list[Weight]:
        hf = f"model.layers.{layer}.self_attn."
        mc = f"decoder.layers.{layer}.self_attention."
        hidden = self.hidden_size
        heads = self.num_attention_heads
        narrow = self.kv_lora_rank
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        keys_values = heads * (self.qk_nope_head_dim + self.v_head_dim)
        kv_a = hf + "kv_a_proj_with_mqa.weight"
        kv_down = mc + "linear_kv_down_proj.weight"
        kv_up = mc + "linear_kv_up_proj.weight"
        rows = [
            Weight.same(kv_a, kv_down, narrow + self.qk_rope_head_dim, hidden),
            Weight.same(hf + "kv_a_layernorm.weight", mc + "kv_layernorm.weight", narrow),
            Weight.rows(hf + "kv_b_proj.weight", kv_up, keys_values, narrow),
            _output(layer, hidden, heads * self.v_head_dim),
        ]
        rank = self.q_lora_rank
        if rank is None:
            q = hf + "q_proj.weight"
            return [*rows, Weight.rows(q, mc + "linear_q_proj.weight", queries, hidden)]
        return [
            *rows,
            Weight.same(hf + "q_a_proj.weight", mc + "linear_q_down_proj.weight", rank, hidden),
            Weight.same(hf + "q_a_layernorm.weight", mc + "q_layernorm.weight", rank),
            Weight.rows(hf + "q_b_proj.weight", mc + "linear_q_up_proj.weight", queries, rank),
        ]


def _output(layer: int, hidden: int, width: int) -> Weight:
    hf = f"model.layers.{layer}.self_attn.o_proj.weight"
    mc = f"decoder.layers.{layer}.self_attention.linear_proj.weight"
    return Weight.columns(hf, mc, hidden, width)


def _sharpness(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


class SigmoidRouted(Sparse):
    """Leading dense layers, then experts that are chosen by the sigmoid of their score and a bias,
    where there are groups of them among the best groups, next to experts that every token uses."""

    num_experts: Positive = Field(alias="n_routed_experts")
    n_shared_experts: Count
    n_group: Positive
    topk_group: Positive
    routed_scaling_factor: Annotated[float, Field(gt=0)]
    norm_topk_prob: bool = True
    first_k_dense_replace: Count | None = None
    topk_method: str | None = None

    router_scores: ClassVar[str] = "sigmoid"
    has_router_bias = True
    default_dense_layers: ClassVar[int] = 1
    """Leading dense layers where ``first_k_dense_replace`` is not set."""

    @property
    def router_layers(self) -> tuple[int, ...]:
        given = self.first_k_dense_replace
        dense = self.default_dense_layers if given is None else given
        return tuple(range(dense, self.num_hidden_layers))

    @property
    def shared_expert_width(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def is_group_limited(self) -> bool:
        """True if some groups of experts are left out before experts are chosen."""
        return self.topk_group < self.n_group

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        experts = self.num_experts
        if experts % self.n_group or self.topk_group > self.n_group:
            found.append(
                f"n_group {self.n_group} and topk_group {self.topk_group}, expected n_group to "
                f"divide n_routed_experts {experts} and topk_group <= n_group"
            )
        elif (left := experts // self.n_group * self.topk_group) < self.topk <= experts:
            found.append(
                f"num_experts_per_tok {self.topk}, expected at most the {left} experts of "
                f"topk_group {self.topk_group} groups"
            )
        return found

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if self.norm_topk_prob != (self.topk > 1):
            found.append(
                f"norm_topk_prob is {str(self.norm_topk_prob).lower()} with num_experts_per_tok "
                f"{self.topk}; the weights of several experts are normalized, that of one is not"
            )
        if self.topk_method not in (None, "noaux_tc"):
            found.append(f"topk_method is {self.topk_method}; experts are chosen by score and bias")
        if self.is_group_limited and self.topk // self.topk_group != 2:
            found.append(
                f"num_experts_per_tok {self.topk} with topk_group {self.topk_group}; groups are "
                "compared by as many experts as they may give, by two only where that is two"
            )
        return found

    def megatron_config(self) -> dict[str, Any]:
        config = super().megatron_config()
        if not self.router_layers:
            return config
        if self.is_group_limited:
            config |= {
                "moe_router_num_groups": self.n_group,
                "moe_router_group_topk": self.topk_group,
            }
        return config | {
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": self.routed_scaling_factor,
        }
