"""GLM-4.5 and GLM-4.7: grouped-query attention that rotates a part of each head, leading dense
layers, sigmoid-routed experts."""

from __future__ import annotations

from pyrl_ext.plan.model.families.blocks import PartlyRotated, Share, SigmoidRouted


class Glm4Moe(SigmoidRouted, PartlyRotated):
    """HF ``Glm4Moe``."""

    use_qk_norm: bool = False
    partial_rotary_factor: Share = 0.5

    has_output_bias = False

    @property
    def has_qk_norm(self) -> bool:
        return self.use_qk_norm
