"""Nemotron-H and Nemotron-3: each layer is a Mamba-2 mixer, an attention without rotary positions,
an MLP without a gate, or sigmoid-routed experts and a shared one."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, Field, model_validator

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.families.blocks import GroupedQuery, SigmoidRouted
from pyrl_ext.plan.model.layer_kinds import LETTERS, LayerKind, StateMixer, mamba
from pyrl_ext.plan.model.weight import Weight

# The letters of `hybrid_override_pattern`, and the words of `layers_block_type`, old and new
KINDS = {letter: kind for kind, letter in LETTERS.items()}
WORDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


class NemotronH(SigmoidRouted, GroupedQuery):
    """HF ``NemotronHConfig``. As transformers does, it prefers `layers_block_type` to the pattern
    and to `num_hidden_layers`."""

    rms_norm_eps: Annotated[float, Field(gt=0)] = Field(
        1e-5, validation_alias=AliasChoices("layer_norm_epsilon", "norm_eps")
    )
    hidden_act: str = Field("relu2", validation_alias="mlp_hidden_act")
    head_dim: Positive | None = 128
    pattern: Annotated[str, Field(pattern=r"^[M*E-]+$")]
    n_shared_experts: Count = 1
    n_group: Positive = 1
    topk_group: Positive = 1
    moe_shared_expert_intermediate_size: Count
    moe_latent_size: Positive | None = None
    ssm_state_size: Positive = 128
    mamba_num_heads: Positive = 128
    mamba_head_dim: Positive = 64
    n_groups: Positive = 8
    conv_kernel: Positive = 4
    chunk_size: Positive = 128
    mamba_hidden_act: str = "silu"
    time_step_limit: Annotated[tuple[float, float], Field(strict=False)] = (0.0, float("inf"))
    use_conv_bias: bool = True
    use_bias: bool = False
    mlp_bias: bool = False
    residual_in_fp32: bool = False

    built_act = "relu2"
    mlp_matrices = 2
    hf_parts: ClassVar = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.norm.": "backbone.norm_f.",
        "model.": "backbone.",
        ".input_layernorm.": ".norm.",
        ".post_attention_layernorm.": ".norm.",
        ".self_attn.": ".mixer.",
        ".mlp.": ".mixer.",
    }

    @model_validator(mode="before")
    @classmethod
    def _one_pattern(cls, hf: Any) -> Any:
        """The layers as one pattern, whichever way they are written; and numbers that are not
        finite, which transformers writes as ``{"__float__": "Infinity"}``."""
        if not isinstance(hf, dict):
            return hf
        words = hf.get("layers_block_type") or hf.get("layer_types")
        pattern = hf.get("hybrid_override_pattern")
        if isinstance(words, list | tuple):
            pattern = "".join(WORDS.get(str(word), "?") for word in words)
        if not isinstance(pattern, str):
            raise ValueError("layers_block_type and hybrid_override_pattern are missing")
        if isinstance(limit := hf.get("time_step_limit"), list | tuple):
            limit = [float(x["__float__"]) if isinstance(x, dict) else x for x in limit]
            hf = hf | {"time_step_limit": limit}
        return {"num_hidden_layers": len(pattern)} | hf | {"pattern": pattern}

    @property
    def has_qk_norm(self) -> bool:
        return False

    @property
    def rotary_width(self) -> int:
        return 0

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(KINDS[letter] for letter in self.pattern)

    @property
    def router_layers(self) -> tuple[int, ...]:
        return tuple(i for i, letter in enumerate(self.pattern) if letter == "E")

    @property
    def shared_expert_width(self) -> int:
        return self.moe_shared_expert_intermediate_size

    @property
    def tp_widths(self) -> dict[str, int]:
        dense = {"intermediate_size": self.intermediate_size} if "-" in self.pattern else {}
        return dense | {"moe_shared_expert_intermediate_size": self.shared_expert_width}

    @property
    def state_mixer(self) -> StateMixer | None:
        if "M" not in self.pattern:
            return None
        return mamba(
            self.mamba_num_heads,
            self.mamba_head_dim,
            self.n_groups,
            self.ssm_state_size,
            self.conv_kernel,
            self.chunk_size,
        )

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        layers = len(self.pattern)
        if self.num_hidden_layers != layers:
            found.append(
                f"num_hidden_layers {self.num_hidden_layers} with {layers} layers in "
                f"layers_block_type or hybrid_override_pattern, expected {layers}"
            )
        if self.mamba_num_heads % self.n_groups:
            found.append(
                f"n_groups {self.n_groups} does not divide mamba_num_heads {self.mamba_num_heads}, "
                "expected a divisor; as many heads share each group's B and C"
            )
        return found

    def unsupported(self) -> list[str]:
        odd = {
            f"moe_latent_size is {self.moe_latent_size}; experts are built at the hidden size": (
                self.moe_latent_size is not None
            ),
            f"n_shared_experts is {self.n_shared_experts}; one shared expert of "
            "moe_shared_expert_intermediate_size is built": self.n_shared_experts != 1,
            f"mamba_hidden_act is {self.mamba_hidden_act}; mixers are built with silu": (
                self.mamba_hidden_act != "silu"
            ),
            f"time_step_limit is {list(self.time_step_limit)}; time steps are not bounded": (
                self.time_step_limit != (0.0, float("inf"))
            ),
            "use_conv_bias is false; convolutions are built with a bias": not self.use_conv_bias,
            "use_bias is true; projections of mixers are built without biases": self.use_bias,
            "mlp_bias is true; feed-forward layers are built without biases": self.mlp_bias,
            "residual_in_fp32 is true; residual sums have the dtype of the model": (
                self.residual_in_fp32
            ),
        }
        return super().unsupported() + [reason for reason, holds in odd.items() if holds]

    def megatron_config(self) -> dict[str, Any]:
        return super().megatron_config() | {
            "mamba_num_heads": self.mamba_num_heads,
            "mamba_head_dim": self.mamba_head_dim,
            "mamba_num_groups": self.n_groups,
            "mamba_state_dim": self.ssm_state_size,
        }

    def state_rows(self, layer: int) -> list[Weight]:
        hf = f"model.layers.{layer}.mixer."
        mc = f"decoder.layers.{layer}.self_attention."
        hidden = self.hidden_size
        heads = self.mamba_num_heads
        inner = heads * self.mamba_head_dim
        shared = self.n_groups * self.ssm_state_size
        channels = inner, shared, shared
        projections = {hf + "in_proj.weight": (inner, inner, shared, shared, heads)}
        taps = {hf + "conv1d.weight": channels}
        biases = {hf + "conv1d.bias": channels}
        return [
            Weight.sectioned(mc + "in_proj.weight", projections, 1, hidden),
            Weight.sectioned(mc + "conv1d_weight", taps, 1, 1, self.conv_kernel),
            Weight.sectioned(mc + "conv1d_bias", biases, 1),
            replace(Weight.rows(hf + "A_log", mc + "A_log", heads), start="decays"),
            replace(Weight.rows(hf + "dt_bias", mc + "dt_bias", heads), start="steps"),
            replace(Weight.rows(hf + "D", mc + "D", heads), start="ones"),
            Weight.rows(hf + "norm.weight", mc + "norm.weight", inner),
            Weight.columns(hf + "out_proj.weight", mc + "out_proj.weight", hidden, inner),
        ]

    def renamed(self, row: Weight) -> Weight:
        if row.megatron_name == "decoder.final_layernorm.weight":
            row = replace(row, start="ones")
        return super().renamed(row)

    def ignored(self, mtp_layers: int) -> dict[str, str]:
        return super().ignored(mtp_layers) | {r"mtp\..*": "layers for multi-token prediction"}
