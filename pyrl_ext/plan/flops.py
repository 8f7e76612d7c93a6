"""Floating-point operations of a forward pass, by the kind of kernel that does them.

Counted are matrix products, two operations a multiplication. A backward pass takes twice as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyrl_ext.plan.shape import Shape, layer_parameters, mtp_parameters
from pyrl_ext.plan.stages import Stage


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

    def of(self, rows: float, pairs: float, scored: float) -> float:
        """All operations of ``rows`` rows, ``pairs`` causal pairs and ``scored`` rows."""
        return (
            (self.projections + self.experts) * rows + self.attention * pairs + self.head * scored
        )


def head_widths(shape: Any) -> tuple[int, int]:
    """Elements of a query or key head, and of a value head."""
    if getattr(shape, "kv_lora_rank", None) is not None:
        return shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.v_head_dim
    width = getattr(shape, "head_width", shape.hidden_size // shape.num_attention_heads)
    return width, width


def stage_flops(shape: Shape, chunk: Stage) -> Flops:
    """One row, pair or scored row of a model chunk; layers for more tokens ahead score, too."""
    head = 2 * shape.vocab_size * shape.hidden_size * (chunk.loss + chunk.mtp)
    total = Flops(head=head)
    for layer in chunk.layers:
        total += _layer(shape, layer)
    for _ in range(chunk.mtp):
        total += _layer(shape, None)
    return total


def model_flops(shape: Shape, mtp: int = 0) -> Flops:
    """One row, pair or scored row of the whole model, with ``mtp`` of those layers."""
    return stage_flops(shape, Stage(True, tuple(range(shape.num_hidden_layers)), mtp, True))


def _layer(shape: Shape, layer: int | None) -> Flops:
    """A decoder layer, or one for multi-token prediction (None)."""
    held = mtp_parameters(shape) if layer is None else layer_parameters(shape, layer)
    routed = layer is None or layer in shape.router_layers
    router = shape.hidden_size * shape.num_experts if routed else 0
    return Flops(
        projections=2 * (held.tensor + router),
        experts=2 * held.active_expert,
        attention=2 * shape.num_attention_heads * sum(head_widths(shape)),
    )
