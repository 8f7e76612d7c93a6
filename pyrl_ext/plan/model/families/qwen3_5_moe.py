"""Qwen3.5-MoE with a vision tower."""

from pyrl_ext.plan.model.families.qwen3_5_moe_text import SIZES as SIZES
