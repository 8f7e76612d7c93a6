"""DeepSeek-V3, GLM-4.7-Flash and Kimi-K2.5: latent attention, leading dense layers, sigmoid-routed
experts with a selection bias, and shared experts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pyrl_ext.plan.model.families.blocks import Latent, SigmoidRouted
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.model.towers import TowerKind


class DeepseekV3(SigmoidRouted, Latent):
    """DeepSeek-V3 and Moonlight (HF ``DeepseekV3``)."""

    default_dense_layers = 3


class Glm4MoeLite(SigmoidRouted, Latent):
    """GLM-4.7-Flash (HF ``Glm4MoeLite``): dense and sparse layers in any order."""

    mlp_layer_types: Annotated[
        tuple[Literal["dense", "sparse"], ...] | None, Field(strict=False)
    ] = None

    @property
    def router_layers(self) -> tuple[int, ...]:
        if self.mlp_layer_types is None:
            return super().router_layers
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        dense = self.first_k_dense_replace
        kinds = self.mlp_layer_types
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            found.append(
                f"mlp_layer_types has {len(kinds)} entries, expected one for each of "
                f"num_hidden_layers {self.num_hidden_layers}"
            )
        elif dense is not None and self.router_layers != super().router_layers:
            found.append(
                f"first_k_dense_replace {dense} and mlp_layer_types disagree, expected the same "
                "dense layers; engine and trainer would build different models. Remove one"
            )
        return found


class KimiK25(VisionLanguage, DeepseekV3):
    """Kimi-K2.5 (HF ``Kimi_K25``), and models of its shape such as Moonlight with MoonViT, whose
    table of positions is interpolated by cubic curves."""

    text_prefix: ClassVar = ("", "language_model.")
    tower_kind: ClassVar = TowerKind(
        has_frames=False,
        has_square_positions=True,
        epsilon=1e-5,
        interpolation="bicubic",
        align_corners=False,
        pairs="neighbours",
        rasters=True,
        final_norm=True,
    )
    tower_names: ClassVar = {
        "embedding.positions": "vision_tower.patch_embed.pos_emb.weight",
        "embedding.": "vision_tower.patch_embed.proj.",
        "decoder.layers": "vision_tower.encoder.blocks",
        "decoder.": "vision_tower.encoder.",
        "input_layernorm": "norm0",
        "self_attention.linear_qkv": "wqkv",
        "self_attention.linear_proj": "wo",
        "pre_mlp_layernorm": "norm1",
        "mlp.linear_fc1": "mlp.fc0",
        "mlp.linear_fc2": "mlp.fc1",
        "output_layer.last.norm": "mm_projector.pre_norm",
        "output_layer.last.linear_fc1": "mm_projector.proj.0",
        "output_layer.last.linear_fc2": "mm_projector.proj.2",
    }
