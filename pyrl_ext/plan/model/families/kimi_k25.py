"""Kimi-K2.5, and Moonlight with a tower of its kind: DeepSeek-V3 that reads images."""

from pyrl_ext.plan.model.families.deepseek_v3 import SIZES as SIZES
