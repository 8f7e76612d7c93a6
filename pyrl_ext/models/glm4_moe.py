"""GLM-4.5 and GLM-4.7 (HF ``Glm4Moe``): grouped-query attention with biases that rotates a part of
each head, dense first layers, then sigmoid-routed experts with a selection bias and shared ones."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, blocks
from pyrl_ext.plan.model.families.glm4_moe import Glm4Moe


def config(sizes: Glm4Moe) -> dict[str, Any]:
    return blocks.common(sizes) | blocks.grouped_query(sizes) | blocks.sigmoid_router(sizes)


FAMILY = Family(config, blocks.decoder(blocks.grouped_query_rows))
