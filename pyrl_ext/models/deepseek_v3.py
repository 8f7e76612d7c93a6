"""DeepSeek-V3 and Moonlight (HF ``DeepseekV3``): multi-latent attention, dense first layers, then
sigmoid-routed experts with a selection bias and shared experts."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, blocks
from pyrl_ext.plan.model.families.deepseek_v3 import DeepseekV3
from pyrl_ext.plan.model.families.glm4_moe_lite import Glm4MoeLite


def config(sizes: DeepseekV3 | Glm4MoeLite) -> dict[str, Any]:
    return blocks.common(sizes) | blocks.latent(sizes) | blocks.sigmoid_router(sizes)


FAMILY = Family(config, blocks.decoder(blocks.latent_rows))
