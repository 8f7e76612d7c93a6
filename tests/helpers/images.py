"""Small models that take images, and prompts with images for them."""

from __future__ import annotations

from typing import Any

import torch

from pyrl_ext.data.images import Scale
from pyrl_ext.samples import Image, Prompt
from tests.helpers.engines import GLM, QWEN

PAD = 70
START = 71
END = 72
SCALE = Scale(torch.tensor(1 / 64), torch.tensor(-2.0))
IDS = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TEXT = {
    **QWEN,
    "model_type": "qwen3_vl_moe_text",
    "rope_parameters": {**ROPE, "mrope_interleaved": True},
    "mlp_only_layers": [],
}
QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "text_config": TEXT,
    "vision_config": {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "tie_word_embeddings": True,
    "video_token_id": 73,
    **IDS,
}
KIMI: dict[str, Any] = {
    "model_type": "kimi_k25",
    "text_config": GLM | {"model_type": "deepseek_v3", "vocab_size": 96},
    "vision_config": {
        "patch_size": 4,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
    },
    "projection_hidden_size": 16,
    "tie_word_embeddings": False,
    "video_token_id": 73,
    **IDS,
}


def prompt_of(
    number: int,
    *sizes: tuple[int, int],
    width: int = 96,
    text: int = 3,
    marks: tuple[int, int, int] = (START, PAD, END),
    seed: int = 0,
) -> Prompt:
    """Text, then an image of each of ``sizes`` (patches in height and width), then text.

    Args:
        width: numbers of a patch.
        text: tokens before the images.
        marks: tokens before an image, for each of its rows, and after it.
        seed: of the pictures; the tokens do not depend on it.
    """
    g = torch.Generator().manual_seed(number)
    tokens: list[int] = torch.randint(6, 70, (text,), generator=g).tolist()
    images: list[Image] = []
    g.manual_seed(1000 * seed + number)
    for height, wide in sizes:
        rows = height * wide // 4
        patches = torch.randint(0, 256, (height * wide, width), generator=g).to(torch.uint8)
        images.append(Image(len(tokens) + 1, rows, (1, height, wide), patches))
        tokens += [marks[0], *[marks[1]] * rows, marks[2]]
    return Prompt(number, (*tokens, 5), images=tuple(images))
