"""Images of prompts, as vLLM takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrl_ext.samples import Image

if TYPE_CHECKING:
    from vllm.inputs import EngineInput

Scale = Callable[[Tensor], Tensor]  # [P, W] patches in 8 bits -> float32


class PromptImages:
    """Hands vLLM the patches and the placeholders that the trainer trains on.

    vLLM has an image processor too, which would resize a picture by another library. So it gets
    what it would make of a picture, by its documented type for that: tokens with a placeholder for
    every row, the rows of every image, its patches, and a name under which it caches them.

    Args:
        scale: of its image processor; None: prompts have no images.
    """

    def __init__(self, scale: Scale | None):
        self.scale = scale

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine: patches come scaled; none are kept for later requests."""
        if self.scale is None:
            return {}
        return {
            "mm_device_do_normalize": False,
            "mm_processor_cache_gb": 0,
            "limit_mm_per_prompt": {"video": 0},
        }

    def input(self, tokens: Sequence[int], images: Sequence[Image]) -> EngineInput:
        """A prompt for `add_request`."""
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import (
            MultiModalFieldConfig,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        if not images or self.scale is None:
            return tokens_input(list(tokens))
        counts = torch.tensor([len(image.patches) for image in images])
        patches = self.scale(torch.cat([image.patches for image in images]))
        fields: Any = {
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([image.grid for image in images]),
        }
        places = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", counts),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        return mm_input(
            list(tokens),
            MultiModalKwargsItems.from_hf_inputs(fields, places),
            {"image": [_name(image) for image in images]},
            {"image": [PlaceholderRange(image.row, image.rows) for image in images]},
        )


def _name(image: Image) -> str:
    """Under which vLLM keeps what its tower made of the image: the same for equal patches only."""
    digest = hashlib.sha256(repr(image.grid).encode())
    digest.update(image.patches.contiguous().numpy())
    return digest.hexdigest()
