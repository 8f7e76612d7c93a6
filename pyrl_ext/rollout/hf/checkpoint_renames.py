"""Published checkpoints whose tensors transformers renames and splits when it loads them."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

# part of a name in transformers' model -> the same part of the published name; replaced in turn
KIMI = {
    r"^lm_head": "language_model.lm_head",
    r"^model\.language_model": "language_model.model",
    r"^model\.vision_tower\.layers\.(\d+)": r"vision_tower.encoder.blocks.\1",
    r"^model\.vision_tower\.final_layernorm": "vision_tower.encoder.final_layernorm",
    r"^model\.": "",
    r"pos_emb\.position_embeddings": "pos_emb.weight",
    r"(blocks\.\d+)\.norm1": r"\1.norm0",
    r"(blocks\.\d+)\.norm2": r"\1.norm1",
    r"(blocks\.\d+)\.attn\.proj": r"\1.wo",
    r"(blocks\.\d+)\.mlp\.fc1": r"\1.mlp.fc0",
    r"(blocks\.\d+)\.mlp\.fc2": r"\1.mlp.fc1",
    r"mm_projector\.in_proj": "mm_projector.proj.0",
    r"mm_projector\.out_proj": "mm_projector.proj.2",
}
MIXTRAL = {
    r"\.mlp(?=\.|$)": ".block_sparse_moe",
    r"(\.experts(?:\.\d+)?)\.gate_proj": r"\1.w1",
    r"(\.experts(?:\.\d+)?)\.up_proj": r"\1.w3",
    r"(\.experts(?:\.\d+)?)\.down_proj": r"\1.w2",
}
RENAMED = {
    "kimi_k25": KIMI,
    "nemotron_h": {r"^model\.": "backbone."},
    "mixtral": MIXTRAL,
    "minimax_m2": MIXTRAL,
}
_ATTENTION = re.compile(r"(.*blocks\.\d+)\.attn\.([qkv])_proj(.*)")


def published(config: Any, views: dict[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Published name -> the parts of the model's memory that it fills, one after the other.

    Args:
        config: of transformers.
        views: name in transformers' model -> its memory, experts one by one.

    Returns: a part has as many numbers as its share of the published tensor's rows, in their order.
    """
    renamed = RENAMED.get(config.model_type, {})
    found: dict[str, tuple[Tensor, ...]] = {}
    for name, view in views.items():
        for theirs, ours in renamed.items():
            name = re.sub(theirs, ours, name)
        fused = _ATTENTION.fullmatch(name) if renamed is KIMI else None
        if fused:  # queries, keys and values come in this order
            name = f"{fused[1]}.wqkv{fused[3]}"
            if (
                fused[2] != "v"
            ):  # published with the numbers that rotate together next to each other
                heads = config.vision_config.num_attention_heads
                view = view.unflatten(0, (heads, 2, -1)).transpose(1, 2)
        found[name] = (*found.get(name, ()), view)
    return found
