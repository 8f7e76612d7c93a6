"""Qwen3.5: the layers of Qwen3-Next, dense."""

from __future__ import annotations

from pyrl_ext.plan.language.fields import Positive
from pyrl_ext.plan.model.families.qwen3 import Qwen3
from pyrl_ext.plan.model.families.qwen3_next import DeltaNets


class Qwen35(DeltaNets, Qwen3):
    """HF ``Qwen3_5TextConfig``."""

    head_dim: Positive | None = 256


SIZES = Qwen35
