"""DeepSeek-V3 and Moonlight (HF ``DeepseekV3``): multi-latent attention, dense first layers, then
sigmoid-routed experts with a selection bias and shared experts."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, blocks


def config(shape: Any) -> dict[str, Any]:
    return blocks.common(shape) | blocks.latent(shape) | blocks.sigmoid_router(shape)


FAMILY = Family(config, blocks.decoder(blocks.latent_rows))
