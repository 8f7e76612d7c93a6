"""Qwen3.5 with a vision tower."""

from pyrl_ext.plan.model.families.qwen3_5_text import SIZES as SIZES
