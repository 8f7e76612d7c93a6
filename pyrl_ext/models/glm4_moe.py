"""GLM-4.5 and GLM-4.7 (HF ``Glm4Moe``): grouped-query attention with biases that rotates a part of
each head, dense first layers, then sigmoid-routed experts with a selection bias and shared ones."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, parts


def config(shape: Any) -> dict[str, Any]:
    return parts.common(shape) | parts.grouped_query(shape) | parts.sigmoid_router(shape)


FAMILY = Family(config, parts.decoder(parts.grouped_query_rows))
