"""GLM-4.5 and GLM-4.7: grouped-query attention that rotates a part of each head, leading dense
layers, sigmoid-routed experts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pyrl_ext.plan.model.families.blocks import GroupedQuery, SigmoidRouted


class Glm4Moe(SigmoidRouted, GroupedQuery):
    """HF ``Glm4MoeConfig``."""

    use_qk_norm: bool = False
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5

    has_output_bias = False

    @property
    def has_qk_norm(self) -> bool:
        return self.use_qk_norm

    @property
    def rotary_width(self) -> int:
        rope = self.rope_parameters or {}
        return int(self.head_width * rope.get("partial_rotary_factor", self.partial_rotary_factor))


SIZES = Glm4Moe
