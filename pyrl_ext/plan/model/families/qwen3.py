"""Qwen3, Qwen3-MoE and Qwen3-VL-MoE: grouped-query attention with a norm on each query and key
head."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, Field

from pyrl_ext.plan.language.fields import Count, Positive
from pyrl_ext.plan.model.families.blocks import Windowed
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.sizes import Sparse
from pyrl_ext.plan.model.towers import TowerKind


class Qwen3(Windowed):
    """HF ``Qwen3``: dense."""

    head_dim: Positive | None = 128


class Qwen3Moe(Sparse, Qwen3):
    """HF ``Qwen3Moe``: softmax-routed experts, and dense layers where the config puts them."""

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

    def megatron_config(self) -> dict[str, Any]:
        # normalizing the chosen experts' probabilities is the softmax of their logits alone
        return super().megatron_config() | {"moe_router_pre_softmax": not self.norm_topk_prob}


class QwenVision(VisionLanguage):
    """The vision tower of Qwen3-VL and of Qwen3.5."""

    text_prefix: ClassVar = ("model.", "model.language_model.")
    tower_kind: ClassVar = TowerKind(
        has_frames=True,
        has_square_positions=False,
        epsilon=1e-6,
        interpolation="bilinear",
        align_corners=True,
        pairs="halves",
    )
    tower_names: ClassVar = {
        "embedding.positions": "model.visual.pos_embed.weight",
        "embedding.": "model.visual.patch_embed.proj.",
        "decoder.layers": "model.visual.blocks",
        "input_layernorm": "norm1",
        "self_attention.linear_": "attn.",
        "pre_mlp_layernorm": "norm2",
        "output_layer.last": "model.visual.merger",
        "output_layer.taken": "model.visual.deepstack_merger_list",
    }


class Qwen3VlMoe(QwenVision, Qwen3Moe):
    """HF ``Qwen3VLMoe``: rows have positions in time, height and width, and the tower's layers
    ``deepstack_visual_indexes`` feed the first layers of the language model."""

    norm_topk_prob: bool = True

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        width = self.moe_intermediate_size
        if self.hidden_size in (width, 2 * width):
            found.append(
                f"moe_intermediate_size {width} with hidden_size {self.hidden_size}, expected "
                "neither that nor half of it; files stack the experts of a layer, and a square "
                "tensor does not tell which side is an expert's rows"
            )
        return found

    def unsupported(self) -> list[str]:
        odd = {
            "norm_topk_prob is false; transformers normalizes the experts' weights all the same": (
                not self.norm_topk_prob
            ),
            "mrope_section is missing": not self.rope_sections,
        }
        return super().unsupported() + [reason for reason, holds in odd.items() if holds]
