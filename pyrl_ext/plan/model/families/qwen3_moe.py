"""Qwen3-MoE: the attention of Qwen3, softmax-routed experts."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.families.qwen3 import Qwen3
from pyrl_ext.plan.model.sizes import Sparse


class Qwen3Moe(Sparse, Qwen3):
    """HF ``Qwen3MoeConfig``."""

    # published configs have the first name, transformers 5 saves the second
    num_experts: Positive = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    head_dim: Positive | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None

    @property
    def router_layers(self) -> tuple[int, ...]:
        step = self.decoder_sparse_step
        dense = self.mlp_only_layers or ()
        return tuple(
            i for i in range(self.num_hidden_layers) if (i + 1) % step == 0 and i not in dense
        )

    def contradictions(self) -> list[str]:
        found = super().contradictions()
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
        return found


SIZES = Qwen3Moe
