"""Qwen3 (HF ``Qwen3``): dense, grouped-query attention with a norm on each query and key head."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, blocks
from pyrl_ext.plan.model.families.qwen3 import Qwen3


def config(sizes: Qwen3) -> dict[str, Any]:
    return blocks.common(sizes) | blocks.grouped_query(sizes)


FAMILY = Family(config, blocks.decoder(blocks.grouped_query_rows))
