"""Rotary position embeddings of packed sequences, with YaRN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.plan.model.sizes import Yarn


class PackedRotary(torch.nn.Module):
    """Rotary angles of the rows this rank holds, from their positions: no loop over sequences.

    Stands where megatron's ``RotaryEmbedding`` or ``YarnRotaryEmbedding`` stands, in the model or
    in multi-latent attention; its first argument is whatever `get_rotary_seq_len` returned, here
    the positions themselves.
    """

    def __init__(self, dim: int, base: float, device: torch.device, yarn: Yarn | None = None):
        super().__init__()
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.yarn = yarn
        # fp32 whatever the model's dtype: not a buffer, so that Float16Module leaves it alone
        self.inv_freq = 1.0 / base**exponents
        if yarn is not None:
            stretched = _stretched_share(dim, base, yarn)
            self.inv_freq *= 1 - stretched + stretched / yarn.factor
        self.inv_freq = self.inv_freq.to(device)

    def get_rotary_seq_len(self, _context, _block, _hidden, _config, packed: PackedSequences):
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = True, cp_group: Any = None) -> Any:
        """[T_local] positions -> [T_local, 1, dim] angles; with yarn, also the factor of what they
        rotate, as megatron's own does."""
        half = positions[:, None].float() * self.inv_freq
        angles = torch.cat((half, half), dim=-1)[:, None]
        return angles if self.yarn is None else (angles, self.yarn.rotation_scale)


def _stretched_share(dim: int, base: float, yarn: Yarn) -> Tensor:
    """[dim / 2] in 0..1, how much of the whole factor each wavelength is stretched by: between the
    dimension that turns ``beta_fast`` times in the original context and the one that does so
    ``beta_slow`` times it rises evenly."""

    def dimension(turns: float) -> float:
        return dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / math.log(base) / 2

    first, last = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return ((torch.arange(dim // 2) - first) / (last - first or 1e-3)).clamp(0, 1)
