"""Qwen3-VL-MoE (HF ``Qwen3VLMoe``): Qwen3-MoE whose rows have positions in time, height and width,
and a tower whose layers ``deepstack_visual_indexes`` feed the language model's first layers."""

from __future__ import annotations

from pyrl_ext.megatron.config import TowerKind
from pyrl_ext.models import qwen3_moe
from pyrl_ext.models.vision_tower import family_with_tower

KIND = TowerKind(
    patch=lambda tower: (3, tower.temporal_patch_size, tower.patch_size, tower.patch_size),
    positions=lambda tower: (tower.positions,),
    epsilon=1e-6,
    interpolation="bilinear",
    align_corners=True,
    pairs="halves",
)
NAMES = {
    "embedding.positions": "model.visual.pos_embed.weight",
    "embedding.": "model.visual.patch_embed.proj.",
    "decoder.layers": "model.visual.blocks",
    "input_layernorm": "norm1",
    "self_attention.linear_": "attn.",
    "pre_mlp_layernorm": "norm2",
    "output_layer.last": "model.visual.merger",
    "output_layer.taken": "model.visual.deepstack_merger_list",
}
TEXT = {"model.": "model.language_model."}

FAMILY = family_with_tower(qwen3_moe.FAMILY, TEXT, KIND, NAMES)
