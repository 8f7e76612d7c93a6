"""Blocks that families share: two kinds of attention, and routers that score by sigmoid."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.sizes import ModelSizes, Sparse, Yarn

# The epsilon of transformers' norms inside multi-latent attention, whatever rms_norm_eps says.
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
    def yarn(self) -> Yarn | None:
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
            found.append("rope_interleave is false; neighbouring elements are rotated together")
        return found

    def notes(self) -> list[str]:
        eps = (
            f"rms_norm_eps is {self.rms_norm_eps:g}; transformers computes the q_a and kv_a norms "
            f"with {MLA_NORM_EPS:g}, other engines with {self.rms_norm_eps:g}: log-probs differ "
            "by about 1e-5"
        )
        return [eps] if self.rms_norm_eps != MLA_NORM_EPS else []


def _sharpness(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


class SigmoidRouted(Sparse):
    """Leading dense layers, then experts that are chosen by the sigmoid of their score and a bias,
    where there are groups of them among the best groups, beside experts that every token uses."""

    num_experts: Positive = Field(alias="n_routed_experts")
    n_shared_experts: Count
    n_group: Positive
    topk_group: Positive
    routed_scaling_factor: Annotated[float, Field(gt=0)]
    norm_topk_prob: bool = True
    first_k_dense_replace: Count | None = None

    has_router_bias = True
    default_dense_layers: ClassVar[int] = 1
    """Leading dense layers where ``first_k_dense_replace`` does not say."""

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
        if self.is_group_limited and self.topk // self.topk_group != 2:
            found.append(
                f"num_experts_per_tok {self.topk} with topk_group {self.topk_group}; groups are "
                "compared by as many experts as they may give, by two only where that is two"
            )
        return found
