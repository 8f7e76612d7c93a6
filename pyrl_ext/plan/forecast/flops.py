"""Floating-point operations of a forward pass, by kind of kernel, and of an update.

Only matrix products count, with two operations for a multiply-add. A backward pass takes twice as
many.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyrl_ext.plan.forecast.encoder import encoders
from pyrl_ext.plan.forecast.parameters import adapters
from pyrl_ext.plan.forecast.workload import scored_share, step_samples
from pyrl_ext.plan.model.attention import head_widths
from pyrl_ext.plan.model.chunks import ModelChunk
from pyrl_ext.plan.model.counts import Sums, layer_parameters, whole_projections
from pyrl_ext.plan.model.layer_kinds import LayerKind
from pyrl_ext.plan.model.sizes import ModelSizes
from pyrl_ext.plan.plan import Plan


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
    scan: float = 0.0
    """For a row: convolutions and chunked scans of mixers that carry a state."""

    def of(self, rows: float, pairs: float, scored: float) -> float:
        """All operations for so many rows, causal pairs and scored rows."""
        a_row = self.projections + self.experts + self.scan
        return a_row * rows + self.attention * pairs + self.head * scored


def chunk_flops(sizes: ModelSizes, chunk: ModelChunk) -> Flops:
    """Operations of a model chunk for one row, pair or scored row; MTP layers score as well."""
    head = 2 * sizes.vocab_size * sizes.hidden_size * (chunk.loss + chunk.mtp)
    mtp = Flops(head=head, projections=2 * chunk.mtp * 2 * sizes.hidden_size**2)
    kinds = sizes.kinds_in(chunk)
    of_layer = {kind: _layer(sizes, kind) for kind in {*kinds}}
    return sum((of_layer[kind] for kind in kinds), mtp)


def model_flops(sizes: ModelSizes, mtp: int = 0) -> Flops:
    """Operations of the whole model with `mtp` MTP layers, for one row, pair or scored row."""
    return chunk_flops(sizes, _whole(sizes, mtp))


def sample_rates(plan: Plan) -> tuple[float, float]:
    """Operations of a sample of n rows in a forward pass: (those for n, those for n^2)."""
    each = model_flops(plan.sizes, plan.num_mtp_layers)
    row = each.projections + each.experts + each.scan + each.head * scored_share(plan)
    return row + each.attention / 2, each.attention / 2


def _whole(sizes: ModelSizes, mtp: int) -> ModelChunk:
    return ModelChunk(True, tuple(range(sizes.num_hidden_layers)), mtp, True)


def _layer(sizes: ModelSizes, kind: LayerKind) -> Flops:
    stored = layer_parameters(sizes, kind)
    mixer = sizes.state_mixer
    split = stored.tensor
    scan = 0.0
    pairs = 0
    if kind.feed_forward == "moe":
        split += sizes.hidden_size * (sizes.num_experts + sizes.has_shared_expert_gate)
    if kind.mixer == "attention":
        split += whole_projections(sizes)
        pairs = sizes.num_attention_heads * sum(head_widths(sizes))
    elif kind.has_state and mixer is not None:
        split -= mixer.convolved * mixer.taps + mixer.vectors
        split -= mixer.norm if mixer.norm == mixer.inner else 0
        scan = mixer.convolved * mixer.taps + mixer.scan
    return Flops(2 * split, 2 * stored.active_expert, 2 * pairs, 0.0, 2 * scan)


def update_flops(plan: Plan) -> float:
    """Model FLOPs of a step's updates on all ranks: a forward pass, and for the backward pass the
    same for each gradient that a product has, over the rows and causal pairs of the samples without
    padding."""
    samples = step_samples(plan)
    rows = sum(s.rows for s in samples)
    scored = sum(s.response for s in samples)
    pairs = sum(s.rows * (s.rows + 1) / 2 for s in samples)
    forward = model_flops(plan.sizes, plan.num_mtp_layers)
    total = 3 * forward.of(rows, pairs, scored)
    if plan.lora is not None:  # no gradients of frozen weights
        kinds = plan.sizes.kinds_in(_whole(plan.sizes, plan.num_mtp_layers))
        adapting = sum(
            2 * (plan.sizes.topk if linear.experts else 1) * rank * (linear.inputs + linear.outputs)
            for linear, rank in adapters(plan, kinds)
        )
        total += 3 * adapting * rows - forward.of(rows, 0, scored)
    total += sum(encoder.update_flops for encoder in encoders(plan))
    return total * plan.batching.epochs
