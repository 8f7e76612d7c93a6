"""Attention whose output is gated by as many more outputs of the query projection."""

from __future__ import annotations

from torch import Tensor

from pyrl_ext.megatron.local_layers import TurnedAttention


class GatedAttention(TurnedAttention):
    """megatron's product is compiled, on a CPU too, and anew as microbatches differ in length."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)
