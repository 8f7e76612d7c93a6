"""GLM-4.7-Flash: multi-latent attention, leading dense layers, sigmoid-routed experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pyrl_ext.plan.schema import Count, Positive
from pyrl_ext.plan.shape import Parameters, Shape

# The epsilon of transformers' norms inside multi-latent attention, whatever rms_norm_eps says.
MLA_NORM_EPS = 1e-6


class Glm4MoeLite(Shape):
    """HF ``Glm4MoeLiteConfig``."""

    num_experts: Positive = Field(alias="n_routed_experts")
    n_shared_experts: Count
    n_group: Positive
    topk_group: Positive
    routed_scaling_factor: Annotated[float, Field(gt=0)]
    q_lora_rank: Positive | None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    mlp_layer_types: Annotated[
        tuple[Literal["dense", "sparse"], ...] | None, Field(strict=False)
    ] = None
    first_k_dense_replace: Count | None = None

    has_router_bias = True

    @property
    def router_layers(self) -> tuple[int, ...]:
        if self.mlp_layer_types is not None:
            return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")
        # transformers: without either key, every layer but the first is sparse
        dense = 1 if self.first_k_dense_replace is None else self.first_k_dense_replace
        return tuple(range(dense, self.num_hidden_layers))

    @property
    def shared_expert_width(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def tp_widths(self) -> dict[str, int]:
        return {
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size * n_shared_experts": self.shared_expert_width,
            "q_lora_rank": self.q_lora_rank or 0,
            "kv_lora_rank + qk_rope_head_dim": self.kv_lora_rank + self.qk_rope_head_dim,
        }

    @property
    def attention(self) -> Parameters:
        hidden, heads = self.hidden_size, self.num_attention_heads
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        norms = self.kv_lora_rank
        split = hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        split += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        split += heads * self.v_head_dim * hidden
        if self.q_lora_rank is None:
            split += hidden * query
        else:
            norms += self.q_lora_rank
            split += self.q_lora_rank * (hidden + query)
        return Parameters(replicated=norms, tensor=split)

    def contradictions(self) -> tuple[str, ...]:
        found = list(super().contradictions())
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            found.append(
                f"n_group {self.n_group} and topk_group {self.topk_group}, expected n_group to "
                f"divide n_routed_experts {self.num_experts} and topk_group <= n_group"
            )
        kinds, dense = self.mlp_layer_types, self.first_k_dense_replace
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            found.append(
                f"mlp_layer_types has {len(kinds)} entries, expected one for each of "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        elif kinds is not None and dense is not None and kinds != _leading_dense(dense, len(kinds)):
            found.append(
                f"first_k_dense_replace {dense} and mlp_layer_types disagree, expected the same "
                "dense layers; engine and trainer would build different models. Remove one"
            )
        return tuple(found)

    def notes(self) -> tuple[str, ...]:
        if self.rms_norm_eps == MLA_NORM_EPS:
            return ()
        return (
            f"rms_norm_eps is {self.rms_norm_eps:g}; transformers computes the q_a and kv_a norms "
            f"with {MLA_NORM_EPS:g}, other engines with {self.rms_norm_eps:g}: log-probs differ "
            "by about 1e-5",
        )


def _leading_dense(dense: int, layers: int) -> tuple[str, ...]:
    return tuple("dense" if layer < dense else "sparse" for layer in range(layers))


SHAPE = Glm4MoeLite
