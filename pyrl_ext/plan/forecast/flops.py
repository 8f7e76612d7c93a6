"""Floating-point operations of a forward pass, by the kind of kernel that does them.

Counted are matrix products, two operations a multiplication. A backward pass takes twice as many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any

from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.sizes import ModelSizes, Parameters, layer_parameters, mtp_parameters


@dataclass(frozen=True)
class Flops:
    """Operations of one forward pass."""

    projections: float = 0.0
    """Of every row: attention's products, dense layers, shared experts and routers."""
    experts: float = 0.0
    """Of every row: the routed experts that it chooses."""
    attention: float = 0.0
    """Of every pair of a query and a key it may see: their product, and that with the value."""
    head: float = 0.0
    """Of every scored row: the output projection."""

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.projections + other.projections,
            self.experts + other.experts,
            self.attention + other.attention,
            self.head + other.head,
        )

    def times(self, number: int) -> Flops:
        """Of so many layers."""
        return Flops(*(number * each for each in astuple(self)))

    def of(self, rows: float, pairs: float, scored: float) -> float:
        """All operations of ``rows`` rows, ``pairs`` causal pairs and ``scored`` rows."""
        return (
            (self.projections + self.experts) * rows + self.attention * pairs + self.head * scored
        )


def head_widths(sizes: Any) -> tuple[int, int]:
    """Elements of a query or key head, and of a value head."""
    if "kv_lora_rank" in type(sizes).model_fields:
        return sizes.qk_nope_head_dim + sizes.qk_rope_head_dim, sizes.v_head_dim
    width = getattr(sizes, "head_width", sizes.hidden_size // sizes.num_attention_heads)
    return width, width


def stage_flops(sizes: ModelSizes, chunk: ModelChunk) -> Flops:
    """One row, pair or scored row of a model chunk; layers for more tokens ahead score, too."""
    head = 2 * sizes.vocab_size * sizes.hidden_size * (chunk.loss + chunk.mtp)
    kinds = [layer_parameters(sizes, layer) for layer in chunk.layers]
    kinds += [mtp_parameters(sizes)] * chunk.mtp
    total = Flops(head=head)
    for held, number in Counter(kinds).items():
        total += _layer(sizes, held).times(number)
    return total


def model_flops(sizes: ModelSizes, mtp: int = 0) -> Flops:
    """One row, pair or scored row of the whole model, with ``mtp`` of those layers."""
    return stage_flops(sizes, ModelChunk(True, tuple(range(sizes.num_hidden_layers)), mtp, True))


def _layer(sizes: ModelSizes, held: Parameters) -> Flops:
    router = sizes.hidden_size * sizes.num_experts if held.expert else 0
    return Flops(
        projections=2 * (held.tensor + sizes.whole_projections + router),
        experts=2 * held.active_expert,
        attention=2 * sizes.num_attention_heads * sum(head_widths(sizes)),
    )
