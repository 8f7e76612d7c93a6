"""The sizes of a vision tower, as the ``vision_config`` of an HF config states them."""

from __future__ import annotations

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
        """Layers of each of `pp` pipeline stages: as many for all but the first, which has fewer
        where some are left for it."""
        each = -(-self.num_hidden_layers // pp)
        each -= each * (pp - 1) >= self.num_hidden_layers
        return [self.num_hidden_layers - each * (pp - 1)] + [each] * (pp - 1)
