"""Qwen3.5-MoE (HF ``Qwen3_5MoeForCausalLM``): Qwen3-Next with the delta nets of Qwen3.5."""

from pyrl_ext.models import qwen3_moe
from pyrl_ext.models.qwen3_5_text import projections
from pyrl_ext.models.qwen3_next import family_of

FAMILY = family_of(qwen3_moe.config, projections)
