"""Floating-point operations of a forward pass, by kind of kernel.

Only matrix products count, with two operations for a multiply-add. A backward pass takes twice as
many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pyrl_ext.plan.forecast.attention import head_widths
from pyrl_ext.plan.forecast.counts import (
    Parameters,
    Sums,
    layers,
    mtp_parameters,
    whole_projections,
)
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.sizes import ModelSizes


@dataclass(frozen=True)
class Flops(Sums):
    """Operations of one forward pass."""

    projections: float = 0.0
    """For a row: projections of attention, dense layers, shared experts and routers."""
    experts: float = 0.0
    """For a row: the routed experts that it chooses."""
    attention: float = 0.0
    """For a pair of a query and a key it attends to: their product, and that with the value."""
    head: float = 0.0
    """For a scored row: the output projection."""

    def times(self, number: int) -> Flops:
        """The operations of `number` such layers."""
        return Flops(*(number * each for each in vars(self).values()))

    def of(self, rows: float, pairs: float, scored: float) -> float:
        """All operations for so many rows, causal pairs and scored rows."""
        return (
            (self.projections + self.experts) * rows + self.attention * pairs + self.head * scored
        )


def chunk_flops(sizes: ModelSizes, chunk: ModelChunk) -> Flops:
    """Operations of a model chunk for one row, pair or scored row; MTP layers score as well."""
    head = 2 * sizes.vocab_size * sizes.hidden_size * (chunk.loss + chunk.mtp)
    each = layers(sizes)
    kinds = [each[layer] for layer in chunk.layers]
    kinds += [mtp_parameters(sizes)] * chunk.mtp
    total = Flops(head=head)
    for held, number in Counter(kinds).items():
        total += _layer(sizes, held).times(number)
    return total


def model_flops(sizes: ModelSizes, mtp: int = 0) -> Flops:
    """Operations of the whole model with `mtp` MTP layers, for one row, pair or scored row."""
    return chunk_flops(sizes, ModelChunk(True, tuple(range(sizes.num_hidden_layers)), mtp, True))


def _layer(sizes: ModelSizes, held: Parameters) -> Flops:
    router = sizes.hidden_size * sizes.num_experts if held.expert else 0
    return Flops(
        projections=2 * (held.tensor + whole_projections(sizes) + router),
        experts=2 * held.active_expert,
        attention=2 * sizes.num_attention_heads * sum(head_widths(sizes)),
    )
