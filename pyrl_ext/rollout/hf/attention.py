"""Attention of one new token of each sequence, without a copy of the cache for each query head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "pyrl_ext_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa`, which repeats keys and values for the query heads that share them
    wherever there is a mask: for one new token a copy of the whole cache. Here the query heads of
    a key head are rows of one product.

    Args:
        query: [B, heads, T, D].
        key, value: [B, key heads, keys, D and D_v].
        attention_mask: [B or 1, 1, T, keys] bool; None: all keys.

    Returns: [B, T, heads, D_v], and no weights.
    """
    batch, heads, tokens, width = query.shape
    key_heads = key.shape[1]
    plain = more.get("position_bias") is None and more.get("cache") is None
    one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if tokens > 1 or not plain or not one_mask:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **more
        )
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key_heads, heads // key_heads, width),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
