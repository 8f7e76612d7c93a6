"""MiniMax-M2: grouped-query attention whose queries and keys are normalized over all heads,
sigmoid-routed experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.families.blocks import PartlyRotated, Share
from pyrl_ext.plan.model.families.llama import Mixtral
from pyrl_ext.plan.model.weight import Weight


class MiniMaxM2(Mixtral, PartlyRotated):
    """HF ``MiniMaxM2``."""

    head_dim: Positive | None = 128
    rope_theta: float = 5e6
    partial_rotary_factor: Share = 1.0
    rotary_dim: Positive | None = None
    mtp_modules: Count = Field(0, alias="num_mtp_modules")
    shared_width: Count = Field(0, alias="shared_intermediate_size")
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    use_routing_bias: bool = True
    attention_kinds: Annotated[tuple[int, ...], Field(strict=False, alias="attn_type_list")] = ()

    rope_types = frozenset({"default"})
    router_scores = "sigmoid"
    has_router_bias = True
    normalizes_all_heads = True
    hf_parts: ClassVar[Mapping[str, str]] = {".gate.e_score": ".e_score"} | dict(Mixtral.hf_parts)

    @property
    def rotary_width(self) -> int:
        given = {*self.model_fields_set, *(self.rope_parameters or {})}
        if self.rotary_dim is None or "partial_rotary_factor" in given:
            return super().rotary_width
        return int(self.head_width * (self.rotary_dim / self.head_width))  # as transformers rounds

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        if (self.rotary_dim or 0) > self.head_width:
            found.append(
                f"rotary_dim {self.rotary_dim}, expected at most head_dim {self.head_width}; a "
                "part of each head is rotated"
            )
        return found

    def unsupported(self) -> list[str]:
        kind = self.qk_norm_type
        odd = {
            f"num_experts_per_tok is {self.topk}; the weights of several experts are normalized, "
            "that of one is not": self.topk == 1,
            "use_qk_norm is false; queries and keys are normalized": not self.use_qk_norm,
            f"qk_norm_type is {kind}; a norm is over all heads, per_layer": kind != "per_layer",
            "use_routing_bias is false; routers have a bias": not self.use_routing_bias,
            f"shared_intermediate_size is {self.shared_width}; no expert is used by every token": (
                self.shared_width > 0
            ),
            "attn_type_list has other numbers than 1; every layer has softmax attention": (
                any(kind != 1 for kind in self.attention_kinds)
            ),
        }
        return super().unsupported() + [reason for reason, holds in odd.items() if holds]

    def megatron_config(self) -> dict[str, Any]:
        return super().megatron_config() | {"moe_router_enable_expert_bias": True}

    def attention_rows(self, layer: int) -> list[Weight]:
        hf = f"model.layers.{layer}.self_attn."
        mc = f"decoder.layers.{layer}.self_attention."
        queries = self.num_attention_heads * self.head_width
        keys = self.num_key_value_heads * self.head_width
        *projections, output = super().attention_rows(layer)
        return [
            *projections,
            Weight.rows(hf + "q_norm.weight", mc + "query_norm.weight", queries),
            Weight.rows(hf + "k_norm.weight", mc + "key_norm.weight", keys),
            output,
        ]

    def ignored(self, mtp_layers: int) -> dict[str, str]:
        first = self.num_hidden_layers
        layers = range(first, first + self.mtp_modules)
        reason = "MTP layer; those of this family are not built"
        return super().ignored(mtp_layers) | {rf"model\.layers\.{i}\..*": reason for i in layers}
