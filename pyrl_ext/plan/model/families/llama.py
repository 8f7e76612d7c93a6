"""Llama 2 and 3, SmolLM2 and Mixtral: grouped-query attention without norms of heads."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from pyrl_ext.plan.language.fields import Positive
from pyrl_ext.plan.model.families.blocks import GroupedQuery
from pyrl_ext.plan.model.sizes import Llama3Scaling, Sparse


class Llama(GroupedQuery):
    """HF ``Llama``: dense."""

    mlp_bias: bool = False

    rope_types = frozenset({"default", "llama3"})
    default_groups: ClassVar[int | None] = None
    """Key/value heads where a config has no number of them; None: one for each query head."""

    @model_validator(mode="before")
    @classmethod
    def _number_of_groups(cls, hf: Any) -> Any:
        if not isinstance(hf, dict):
            return hf
        groups = hf.get("num_key_value_heads", cls.default_groups) or hf.get("num_attention_heads")
        return hf | {"num_key_value_heads": groups}

    @property
    def has_qk_norm(self) -> bool:
        return False

    @property
    def rope_scaling(self) -> Llama3Scaling | None:
        if self.rope_type != "llama3":
            return None
        rope = self.rope_parameters or {}
        return Llama3Scaling(
            factor=rope["factor"],
            original_positions=rope.get("original_max_position_embeddings")
            or self.max_position_embeddings,
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
        )

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        if self.rope_type != "llama3":
            return found
        rope = self.rope_parameters or {}
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            if not isinstance(rope.get(name), int | float):
                found.append(f"rope_type llama3 with {name} {rope.get(name)}, expected a number")
        return found

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if self.mlp_bias:
            found.append("mlp_bias is true; feed-forward layers are built without biases")
        return found


class Mixtral(Sparse, Llama):
    """HF ``Mixtral``: softmax-routed experts in every layer."""

    rope_theta: float = 1e6
    num_experts: Positive = Field(alias="num_local_experts")
    moe_intermediate_size: Positive = Field(alias="intermediate_size")
    sliding_window: int | None = None
    router_jitter_noise: float = 0.0

    default_groups = 8
    hf_parts: ClassVar = {
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    }

    @property
    def router_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_hidden_layers))

    def unsupported(self) -> list[str]:
        window = self.sliding_window
        noise = self.router_jitter_noise
        odd = {
            f"sliding_window is {window}; every layer attends to whole sequences": (
                window is not None
            ),
            f"router_jitter_noise is {noise:g}; routers are built without noise": noise != 0,
        }
        return super().unsupported() + [reason for reason, holds in odd.items() if holds]

    def megatron_config(self) -> dict[str, Any]:
        # normalizing the chosen experts' probabilities is the softmax of their logits alone
        return super().megatron_config() | {"moe_router_pre_softmax": False}
