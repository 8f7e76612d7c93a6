"""Qwen3 (HF ``Qwen3``): dense, grouped-query attention with a norm on each query and key head."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, parts


def config(shape: Any) -> dict[str, Any]:
    return parts.common(shape) | parts.grouped_query(shape)


FAMILY = Family(config, parts.decoder(parts.grouped_query_rows))
