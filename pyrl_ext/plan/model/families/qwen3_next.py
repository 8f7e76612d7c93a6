"""Qwen3-Next: gated delta net layers, a gated full attention every few layers, routed experts and a
gated shared one. Its norms are centred at zero: they multiply by 1 + weight."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.families.blocks import PartlyRotated, Share
from pyrl_ext.plan.model.families.qwen3_moe import Qwen3Moe
from pyrl_ext.plan.model.layer_kinds import LayerKind, StateMixer, gated_delta_net

# Rows of a chunk of the delta rule, which no config states
CHUNK = 64


class DeltaNets(PartlyRotated):
    """A model whose layers are gated delta nets, but for every few, whose attention is gated."""

    linear_conv_kernel_dim: Positive = 4
    linear_key_head_dim: Positive = 128
    linear_value_head_dim: Positive = 128
    linear_num_key_heads: Positive = 16
    linear_num_value_heads: Positive = 32
    full_attention_interval: Positive = 4
    partial_rotary_factor: Share = 0.25
    layer_types: Annotated[
        tuple[Literal["linear_attention", "full_attention"], ...] | None, Field(strict=False)
    ] = None
    # checkpoints hold a layer for multi-token prediction, whether or not their configs say so
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=1)] = Field(
        1, validation_alias=AliasChoices("num_nextn_predict_layers", "mtp_num_hidden_layers")
    )

    has_output_gate = True

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        interval = self.full_attention_interval
        mixers = self.layer_types
        if mixers is None:
            mixers = tuple(
                "linear_attention" if (i + 1) % interval else "full_attention"
                for i in range(self.num_hidden_layers)
            )
        routers = {*self.router_layers}
        return tuple(
            LayerKind(
                "attention" if mixer == "full_attention" else "gated_delta_net",
                "moe" if i in routers else "mlp",
            )
            for i, mixer in enumerate(mixers)
        )

    @property
    def state_mixer(self) -> StateMixer | None:
        if not any(kind.has_state for kind in self.layer_kinds):
            return None
        return gated_delta_net(
            self.linear_num_key_heads,
            self.linear_key_head_dim,
            self.linear_num_value_heads,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
            CHUNK,
        )

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        keys = self.linear_num_key_heads
        values = self.linear_num_value_heads
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            found.append(
                f"layer_types has {len(self.layer_types)} entries, expected one for each of "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        if values % keys:
            found.append(
                f"linear_num_key_heads {keys} does not divide linear_num_value_heads {values}, "
                "expected a divisor; as many value heads share each"
            )
        return found


class Qwen3Next(DeltaNets, Qwen3Moe):
    """HF ``Qwen3NextConfig``."""

    head_dim: Positive | None = 256
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: Count = 512

    has_shared_expert_gate = True

    @property
    def shared_expert_width(self) -> int:
        return self.shared_expert_intermediate_size

    @property
    def tp_widths(self) -> dict[str, int]:
        return {
            "intermediate_size": self.intermediate_size,
            "shared_expert_intermediate_size": self.shared_expert_width,
        }


SIZES = Qwen3Next
