"""GLM-4.5 and GLM-4.7 (HF ``Glm4Moe``): grouped-query attention with biases that rotates a part of
each head, dense first layers, then sigmoid-routed experts with a selection bias and shared ones."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, blocks


def config(shape: Any) -> dict[str, Any]:
    return blocks.common(shape) | blocks.grouped_query(shape) | blocks.sigmoid_router(shape)


FAMILY = Family(config, blocks.decoder(blocks.grouped_query_rows))
