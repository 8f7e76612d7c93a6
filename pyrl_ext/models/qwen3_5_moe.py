"""Qwen3.5-MoE as it is published: the language model next to a vision tower, which is that of
Qwen3-VL-MoE without layers that feed the first ones."""

from pyrl_ext.models import qwen3_5_moe_text
from pyrl_ext.models.qwen3_vl_moe import KIND, NAMES, TEXT
from pyrl_ext.models.vision_tower import family_with_tower

FAMILY = family_with_tower(qwen3_5_moe_text.FAMILY, TEXT, KIND, NAMES)
