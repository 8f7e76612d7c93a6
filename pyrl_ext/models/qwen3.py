"""Qwen3 (HF ``Qwen3``): dense, grouped-query attention with a norm on each query and key head."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, blocks


def config(sizes: Any) -> dict[str, Any]:
    return blocks.common(sizes) | blocks.grouped_query(sizes)


FAMILY = Family(config, blocks.decoder(blocks.grouped_query_rows))
