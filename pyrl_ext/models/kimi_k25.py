"""Kimi-K2.5 (HF ``Kimi_K25``), and models of its shape such as Moonlight with MoonViT: DeepSeek-V3
and a tower whose table of positions is stretched by cubic curves."""

from __future__ import annotations

from pyrl_ext.megatron.config import TowerKind
from pyrl_ext.models import deepseek_v3
from pyrl_ext.models.vision_tower import family_with_tower

KIND = TowerKind(
    patch=lambda tower: (3, tower.patch_size, tower.patch_size),
    positions=lambda tower: (tower.positions, tower.positions),
    epsilon=1e-5,
    interpolation="bicubic",
    align_corners=False,
    pairs="neighbours",
    rasters=True,
    final_norm=True,
)
NAMES = {
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
TEXT = {"": "language_model."}

FAMILY = family_with_tower(deepseek_v3.FAMILY, TEXT, KIND, NAMES)
