"""Qwen3.5-MoE: the layers of Qwen3-Next, all of them with experts."""

from __future__ import annotations

from pyrl_ext.plan.language.fields import Count
from pyrl_ext.plan.model.families.qwen3_next import Qwen3Next


class Qwen35Moe(Qwen3Next):
    """HF ``Qwen3_5MoeTextConfig``."""

    intermediate_size: Count = 0

    @property
    def router_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_hidden_layers))

    def unsupported(self) -> list[str]:
        found = super().unsupported()
        if not self.norm_topk_prob:
            found.append(
                "norm_topk_prob is false; transformers normalizes the experts' weights all the same"
            )
        return found


SIZES = Qwen35Moe
