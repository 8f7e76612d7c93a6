"""DeepSeek-V3 and Moonlight: latent attention, leading dense layers, sigmoid-routed experts."""

from __future__ import annotations

from pyrl_ext.plan.model.families.blocks import Latent, SigmoidRouted


class DeepseekV3(SigmoidRouted, Latent):
    """HF ``DeepseekV3Config``."""

    default_dense_layers = 3


SIZES = DeepseekV3
