"""Qwen3: a dense model; grouped-query attention with normalized queries and keys."""

from __future__ import annotations

from pyrl_ext.plan.language.fields import Positive
from pyrl_ext.plan.model.families.blocks import GroupedQuery


class Qwen3(GroupedQuery):
    """HF ``Qwen3Config``."""

    head_dim: Positive | None = 128
    use_sliding_window: bool = False

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if self.use_sliding_window:
            found.append("use_sliding_window is true; every layer attends to whole sequences")
        return found


SIZES = Qwen3
