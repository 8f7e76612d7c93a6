"""Qwen3-MoE (HF ``Qwen3Moe``): the attention of Qwen3, softmax-routed experts, and dense layers
wherever the config puts them."""

from __future__ import annotations

from typing import Any

from pyrl_ext.models import Family, blocks, qwen3
from pyrl_ext.plan.model.families.qwen3_moe import Qwen3Moe


def config(sizes: Qwen3Moe) -> dict[str, Any]:
    return qwen3.config(sizes) | {
        "moe_router_score_function": "softmax",
        # normalizing the chosen experts' probabilities is the softmax of their logits alone
        "moe_router_pre_softmax": not sizes.norm_topk_prob,
    }


FAMILY = Family(config, blocks.decoder(blocks.grouped_query_rows))
