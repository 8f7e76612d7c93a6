"""Qwen3-Next and Qwen3.5: gated delta net layers, and a gated full attention every few layers.
Norms are centred at zero: they multiply by 1 + weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.families.blocks import PartlyRotated, Share
from pyrl_ext.plan.model.families.qwen3 import Qwen3, Qwen3Moe, QwenVision
from pyrl_ext.plan.model.layer_kinds import LayerKind, StateMixer, gated_delta_net
from pyrl_ext.plan.model.weight import Weight

# Rows of a chunk of the delta rule, which no config states
CHUNK = 64
# Name of a tensor of most families' MTP layers -> its name here
MTP_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}


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
    hf_parts: ClassVar = {".shared_experts.": ".shared_expert."}
    projects_by_group: ClassVar[bool] = False
    """The checkpoint has two projections with one group of heads after the other, in place of four
    with all heads of each part in sequence."""

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

    def megatron_config(self) -> dict[str, Any]:
        config = super().megatron_config() | {"layernorm_zero_centered_gamma": True}
        states = [int(kind.has_state) for kind in self.layer_kinds]
        if not any(states):
            return config
        return config | {
            "linear_attention_freq": states,
            "linear_conv_kernel_dim": self.linear_conv_kernel_dim,
            "linear_key_head_dim": self.linear_key_head_dim,
            "linear_value_head_dim": self.linear_value_head_dim,
            "linear_num_key_heads": self.linear_num_key_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
        }

    def state_rows(self, layer: int) -> list[Weight]:
        hf = f"model.layers.{layer}.linear_attn."
        mc = f"decoder.layers.{layer}.self_attention."
        heads = self.linear_num_value_heads
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = heads * self.linear_value_head_dim
        groups = self.linear_num_key_heads if self.projects_by_group else 1
        inputs = {f"{hf}{name}.weight": rows for name, rows in self._projections().items()}
        channels = {hf + "conv1d.weight": (keys, keys, values)}
        norm = Weight.same(hf + "norm.weight", mc + "out_norm.weight", self.linear_value_head_dim)
        return [
            Weight.sectioned(mc + "in_proj.weight", inputs, groups, self.hidden_size),
            Weight.sectioned(mc + "conv1d.weight", channels, 1, 1, self.linear_conv_kernel_dim),
            replace(Weight.rows(hf + "A_log", mc + "A_log", heads), start="decays"),
            replace(Weight.rows(hf + "dt_bias", mc + "dt_bias", heads), start="ones"),
            replace(norm, start="ones"),
            Weight.columns(
                hf + "out_proj.weight", mc + "out_proj.weight", self.hidden_size, values
            ),
        ]

    def _projections(self) -> Mapping[str, tuple[int, ...]]:
        """Input projection in the checkpoint -> rows of one group in each of its sections."""
        heads = self.linear_num_value_heads
        key = self.linear_key_head_dim
        value = self.linear_value_head_dim
        if self.projects_by_group:
            shared = heads // self.linear_num_key_heads
            return {
                "in_proj_qkvz": (key, key, shared * value, shared * value),
                "in_proj_ba": (shared, shared),
            }
        keys = self.linear_num_key_heads * key
        return {
            "in_proj_qkv": (keys, keys, heads * value),
            "in_proj_z": (heads * value,),
            "in_proj_b": (heads,),
            "in_proj_a": (heads,),
        }

    def hf_name(self, name: str) -> str:
        _, mtp_layer, rest = name.partition(f"model.layers.{self.num_hidden_layers}.")
        if mtp_layer:
            name = f"mtp.{MTP_NAMES.get(rest, f'layers.0.{rest}')}"
        return super().hf_name(name)

    def renamed(self, row: Weight) -> Weight:
        if row.start is None and row.hf_names[0].endswith("norm.weight"):
            row = replace(row, start="zeros")
        return super().renamed(row)

    def ignored(self, mtp_layers: int) -> dict[str, str]:
        patterns = super().ignored(mtp_layers)
        if not mtp_layers:
            patterns[r"mtp\..*"] = "MTP layer; the plan says model.mtp: off"
        return patterns


class Qwen3Next(DeltaNets, Qwen3Moe):
    """HF ``Qwen3Next``: softmax-routed experts and a gated shared one."""

    head_dim: Positive | None = 256
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: Count = 512

    has_shared_expert_gate = True
    projects_by_group = True

    @property
    def shared_expert_width(self) -> int:
        return self.shared_expert_intermediate_size

    @property
    def tp_widths(self) -> dict[str, int]:
        return {
            "intermediate_size": self.intermediate_size,
            "shared_expert_intermediate_size": self.shared_expert_width,
        }


class Qwen35(DeltaNets, Qwen3):
    """HF ``Qwen3_5ForCausalLM``: dense."""

    head_dim: Positive | None = 256


class Qwen35Moe(Qwen3Next):
    """HF ``Qwen3_5MoeForCausalLM``: every layer has experts."""

    intermediate_size: Count = 0

    projects_by_group = False

    @property
    def router_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_hidden_layers))

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if not self.norm_topk_prob:
            found.append(
                "norm_topk_prob is false; transformers normalizes the experts' weights all the same"
            )
        return found


class Qwen35Vision(QwenVision, Qwen35):
    """Qwen3.5 as published, with a vision tower."""


class Qwen35MoeVision(QwenVision, Qwen35Moe):
    """Qwen3.5-MoE as published, with a vision tower."""
