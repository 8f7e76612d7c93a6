"""The sizes of a vision tower, as the ``vision_config`` of an HF config states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from pyrl_ext.plan.language.fields import Count, Positive

CHANNELS = 3


def _named(*names: str) -> Any:
    return Field(validation_alias=AliasChoices(*names))


class Tower(BaseModel):
    """Layers that attend within each image, then a projection of every `merge` x `merge` patches
    to a row of the language model. A config may use either of two names."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    num_hidden_layers: Positive = _named("num_hidden_layers", "depth")
    num_attention_heads: Positive = _named("num_attention_heads", "num_heads")
    hidden_size: Positive
    intermediate_size: Positive
    patch_size: Positive
    temporal_patch_size: Positive = 1
    merge: Annotated[
        Positive, BeforeValidator(lambda given: given[0] if isinstance(given, list) else given)
    ] = _named("spatial_merge_size", "merge_kernel_size")
    positions: Positive = _named("num_position_embeddings", "pos_emb_height")
    """Entries of the table of position embeddings, or of its side."""
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    deepstack: Annotated[tuple[Count, ...], Field(strict=False)] = Field(
        (), validation_alias="deepstack_visual_indexes"
    )
    """0-based ids, rising, of the layers whose outputs the language model's first layers add."""

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    def stages(self, pp: int) -> list[int]:
        """Layers of each of `pp` pipeline stages: equal but for the first, which has fewer if any
        are left for it."""
        count = -(-self.num_hidden_layers // pp)
        if count * (pp - 1) >= self.num_hidden_layers:
            count -= 1
        return [self.num_hidden_layers - count * (pp - 1)] + [count] * (pp - 1)


@dataclass(frozen=True)
class TowerKind:
    """Differences between vision towers of the same sizes.

    Args:
        has_frames: a patch has a dimension of frames in the checkpoint.
        has_square_positions: the checkpoint's table of position embeddings has two dimensions.
        epsilon: of all norms.
        interpolation: of that table, with ``align_corners`` as `torch.nn.functional.interpolate`
            takes it.
        pairs: elements of a head that a patch's place rotates together. "halves": i and i + half,
            first by its row, then by its column; "neighbours": 2i and 2i + 1, by its column and its
            row in turn.
        rasters: patches are ordered row by row; False: block by block of those that are merged.
        final_norm: a norm follows the last layer.
    """

    has_frames: bool
    has_square_positions: bool
    epsilon: float
    interpolation: Literal["bilinear", "bicubic"]
    align_corners: bool
    pairs: Literal["halves", "neighbours"]
    rasters: bool = False
    final_norm: bool = False

    def patch(self, tower: Tower) -> tuple[int, ...]:
        """Shape of a patch: channels, frames if it has them, height, width."""
        frames = (tower.temporal_patch_size,) if self.has_frames else ()
        return CHANNELS, *frames, tower.patch_size, tower.patch_size

    def positions(self, tower: Tower) -> tuple[int, ...]:
        """Shape of the table of position embeddings, without the hidden size."""
        side = (tower.positions,)
        return side * 2 if self.has_square_positions else side
