"""The exchange of latent attention under context parallelism: latents, or keys and values.

Latents are usually fewer bytes, but every rank then projects the rows of all ranks to keys and
values.
"""

from __future__ import annotations

from typing import NamedTuple

from pyrl_ext.plan.model.families.blocks import Latent


class Exchanged(NamedTuple):
    """Elements of a token that a tensor-parallel rank sends in a layer."""

    latents: int
    heads: int
    """Keys and values of all heads; values narrower than the keys are padded."""

    @property
    def gathers_latents(self) -> bool:
        """True if the latents are not more than the keys and values."""
        return self.latents <= self.heads

    def __str__(self) -> str:
        if self.gathers_latents:
            chosen = "latents"
            other = "keys and values of all heads"
        else:
            chosen = "keys and values of all heads"
            other = "latents"
        return (
            f"context parallelism gathers {chosen}, {min(self):,} numbers a token and layer, and "
            f"not {other} ({max(self):,})"
        )


def exchanged_elements(sizes: Latent, tp: int) -> Exchanged:
    """Elements that one of `tp` tensor-parallel ranks sends either way."""
    key_width = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    heads = max(1, sizes.num_attention_heads // tp)
    return Exchanged(
        latents=(sizes.kv_lora_rank + sizes.qk_rope_head_dim) // tp,
        heads=heads * (key_width + max(key_width, sizes.v_head_dim)),
    )
