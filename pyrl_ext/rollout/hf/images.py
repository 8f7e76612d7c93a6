"""Images of prompts, as a transformers model takes them, and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from pyrl_ext.pack.images import Images
from pyrl_ext.pack.positions import axial_positions
from pyrl_ext.pack.rank_rows import Lengths
from pyrl_ext.samples import Image

Scale = Callable[[Tensor], Tensor]  # [P, W] patches in 8 bits -> float32


class PromptImages:
    """Decodes the images of prompts for one model.

    Args:
        config: of the model.
        scale: of its image processor; None: prompts have no images.
    """

    def __init__(self, config: PreTrainedConfig, scale: Scale | None):
        self.scale = scale
        vision: Any = getattr(config, "vision_config", None)
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        size = int(getattr(vision, "patch_size", 1))
        # models without time take patches as small pictures
        self.patch = (-1,) if hasattr(vision, "temporal_patch_size") else (3, size, size)
        self.three = "mrope_section" in rope  # numbers a position

    def inputs(
        self, images: Sequence[Sequence[Image]], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Arguments of the model's forward for the images of all prompts of a prefill."""
        flat = [image for each in images for image in each]
        if not flat or self.scale is None:
            return {}
        patches = self.scale(torch.cat([image.patches for image in flat]).to(device))
        return {
            "pixel_values": patches.to(dtype).view(len(patches), *self.patch),
            "image_grid_thw": torch.tensor([image.grid for image in flat], device=device),
        }

    def positions(
        self, images: Sequence[Sequence[Image]], width: int, sizes: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """([3 or no, prompts, width] int64, by how much the position of a later token differs from
        its place [prompts]); [prompts, width] for models with one number a position."""
        count = len(images)
        if not self.three:
            return torch.arange(width)[None].expand(count, -1), np.zeros(count, np.int64)
        flat = [(prompt, image) for prompt, each in enumerate(images) for image in each]
        numbers = Images(
            samples=np.array([prompt for prompt, _ in flat], np.int64),
            rows=np.array([image.row for _, image in flat], np.int64),
            counts=np.array([image.rows for _, image in flat], np.int64),
            grids=np.array([image.grid for _, image in flat], np.int64).reshape(-1, 3),
        )
        # one place more than the longest: where its response begins
        padded = Lengths(np.full(count, width + 1), np.arange(count + 1) * (width + 1))
        rows = np.arange(count * (width + 1))
        each = axial_positions(rows, padded, numbers).reshape(3, count, width + 1)
        ahead = each[0, np.arange(count), sizes] - sizes
        return torch.from_numpy(each[:, :, :width]), ahead
