"""Qwen3-VL-MoE: Qwen3-MoE whose rows have positions in time, height and width, and a vision tower
of which some layers feed the first layers of the language model."""

from __future__ import annotations

from pyrl_ext.plan.model.families.qwen3_moe import Qwen3Moe


class Qwen3VlMoe(Qwen3Moe):
    """HF ``Qwen3VLMoeTextConfig``."""

    norm_topk_prob: bool = True

    def unsupported(self) -> list[str]:
        odd = {
            "norm_topk_prob is false; transformers normalizes the experts' weights all the same": (
                not self.norm_topk_prob
            ),
            "mrope_section is missing": not self.rope_sections,
        }
        return super().unsupported() + [reason for reason, holds in odd.items() if holds]


SIZES = Qwen3VlMoe
