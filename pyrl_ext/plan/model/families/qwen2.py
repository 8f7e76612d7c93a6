"""Qwen2 and Qwen2.5: dense, with biases of query, key and value."""

from __future__ import annotations

from typing import ClassVar

from pyrl_ext.plan.model.families.blocks import Windowed
from pyrl_ext.plan.model.families.llama import Llama


class Qwen2(Windowed, Llama):
    """HF ``Qwen2``; its configs have no key for the biases, which every model has."""

    attention_bias: bool = True

    has_output_bias: ClassVar[bool] = False
    default_groups: ClassVar[int | None] = 32

    def contradictions(self) -> list[str]:
        found = super().contradictions()
        if not self.attention_bias:
            found.append(
                "attention_bias false, expected no such key; every qwen2 model has biases of "
                "query, key and value"
            )
        return found
