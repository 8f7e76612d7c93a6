"""Qwen3-MoE: grouped-query attention with normalized queries and keys, softmax-routed experts."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from pyrl_ext.plan.schema import Count, Positive
from pyrl_ext.plan.shape import Parameters, Shape


class Qwen3Moe(Shape):
    """HF ``Qwen3MoeConfig``."""

    # published configs have the first name, transformers 5 saves the second
    num_experts: Positive = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_key_value_heads: Positive
    head_dim: Positive | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None
    use_sliding_window: bool = False

    @property
    def head_width(self) -> int:
        """Elements of a query, key or value head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def router_layers(self) -> tuple[int, ...]:
        step, dense = self.decoder_sparse_step, self.mlp_only_layers or ()
        return tuple(
            i for i in range(self.num_hidden_layers) if (i + 1) % step == 0 and i not in dense
        )

    @property
    def query_groups(self) -> int:
        return self.num_key_value_heads

    @property
    def tp_widths(self) -> dict[str, int]:
        return {"intermediate_size": self.intermediate_size}

    @property
    def attention(self) -> Parameters:
        hidden, width, heads = self.hidden_size, self.head_width, self.num_attention_heads
        projections = 2 * heads + 2 * self.num_key_value_heads  # queries, output; keys, values
        return Parameters(replicated=2 * width, tensor=hidden * width * projections)

    def contradictions(self) -> tuple[str, ...]:
        found = list(super().contradictions())
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            found.append(
                f"num_key_value_heads {groups} does not divide num_attention_heads {heads}, "
                "expected a divisor; as many query heads share each"
            )
        if outside := [i for i in self.mlp_only_layers or () if i >= self.num_hidden_layers]:
            found.append(
                f"mlp_only_layers names {outside}, expected 0-based layers below "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        if self.norm_topk_prob and self.topk == 1:
            found.append(
                "norm_topk_prob true with num_experts_per_tok 1, expected false; the one expert's "
                "weight would always be 1, and its router would learn nothing"
            )
        return tuple(found)

    def unsupported(self) -> tuple[str, ...]:
        found = super().unsupported()
        if self.use_sliding_window:
            found = (*found, "use_sliding_window is true; every layer attends to whole sequences")
        return found


SHAPE = Qwen3Moe
