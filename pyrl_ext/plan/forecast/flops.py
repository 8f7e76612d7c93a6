"""Floating-point operations of a forward pass, by the kind of kernel that does them.

Counted are matrix products, two operations a multiplication. A backward pass takes twice as many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any

from pyrl_ext.plan.model.chunks import Stage
from pyrl_ext.plan.model.sizes import Parameters, Shape, layer_parameters, mtp_parameters


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


def head_widths(shape: Any) -> tuple[int, int]:
    """Elements of a query or key head, and of a value head."""
    if "kv_lora_rank" in type(shape).model_fields:
        return shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.v_head_dim
    width = getattr(shape, "head_width", shape.hidden_size // shape.num_attention_heads)
    return width, width


def stage_flops(shape: Shape, chunk: Stage) -> Flops:
    """One row, pair or scored row of a model chunk; layers for more tokens ahead score, too."""
    head = 2 * shape.vocab_size * shape.hidden_size * (chunk.loss + chunk.mtp)
    kinds = [layer_parameters(shape, layer) for layer in chunk.layers]
    kinds += [mtp_parameters(shape)] * chunk.mtp
    total = Flops(head=head)
    for held, number in Counter(kinds).items():
        total += _layer(shape, held).times(number)
    return total


def model_flops(shape: Shape, mtp: int = 0) -> Flops:
    """One row, pair or scored row of the whole model, with ``mtp`` of those layers."""
    return stage_flops(shape, Stage(True, tuple(range(shape.num_hidden_layers)), mtp, True))


def _layer(shape: Shape, held: Parameters) -> Flops:
    router = shape.hidden_size * shape.num_experts if held.expert else 0
    return Flops(
        projections=2 * (held.tensor + shape.whole_projections + router),
        experts=2 * held.active_expert,
        attention=2 * shape.num_attention_heads * sum(head_widths(shape)),
    )
