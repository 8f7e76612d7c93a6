"""Rotary position embeddings of packed sequences, with YaRN and the scaling of Llama 3.1."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.megatron.packed_attention import PackedSequences
from pyrl_ext.plan.model.sizes import Llama3Scaling, Yarn


class PackedRotary(torch.nn.Module):
    """Rotary angles of this rank's rows from their positions, without a loop over sequences.

    It replaces megatron's ``RotaryEmbedding`` and ``YarnRotaryEmbedding`` in the model and in
    multi-latent attention. megatron passes the result of `get_rotary_seq_len` as the first argument
    of the forward; here that is the positions.

    Args:
        sections: wavelengths that turn with the position in time, height and width, of models whose
            rows may have three: the shortest wavelengths take turns, what is left turns with time.
    """

    def __init__(
        self,
        dim: int,
        base: float,
        device: torch.device,
        scaling: Yarn | Llama3Scaling | None = None,
        sections: tuple[int, ...] = (),
    ):
        super().__init__()
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.yarn = scaling if isinstance(scaling, Yarn) else None
        self.axes = torch.zeros(dim // 2, dtype=torch.int64, device=device)
        for axis, number in list(enumerate(sections))[1:]:
            self.axes[axis : 3 * number : 3] = axis
        # not a buffer, so that Float16Module leaves it in fp32
        self.inv_freq = 1.0 / base**exponents
        if scaling is not None:
            stretched = _stretched_share(self.inv_freq, dim, base, scaling)
            self.inv_freq *= 1 - stretched + stretched / scaling.factor
        self.inv_freq = self.inv_freq.to(device)

    def get_rotary_seq_len(self, _context, _block, _hidden, _config, packed: PackedSequences):
        return packed.positions

    def forward(self, positions: Tensor, packed_seq: bool = True, cp_group: Any = None) -> Any:
        """Positions [T_local] or [3, T_local] -> angles [T_local, 1, dim]; with YaRN also the
        factor of the rotated queries and keys, as megatron's class returns it."""
        half = self._half(positions)
        angles = torch.cat((half, half), dim=-1)[:, None]
        return angles if self.yarn is None else (angles, self.yarn.rotation_scale)

    def turns(self, packed: PackedSequences) -> Tensor:
        """[T_local, dim] float32, cosines and sines of each row's angles, times YaRN's factor of
        the rotated queries and keys: what `ops.rotary` turns by. Computed once a microbatch."""
        if self not in packed.turns:
            half = self._half(packed.positions)
            turns = torch.cat((half.cos(), half.sin()), dim=-1)
            packed.turns[self] = turns * self.yarn.rotation_scale if self.yarn else turns
        return packed.turns[self]

    def _half(self, positions: Tensor) -> Tensor:
        of_rows = positions[:, None] if positions.dim() == 1 else positions[self.axes].T
        return of_rows.float() * self.inv_freq


def _stretched_share(
    inv_freq: Tensor, dim: int, base: float, scaling: Yarn | Llama3Scaling
) -> Tensor:
    """[dim / 2] in 0..1, the share of the factor that stretches each wavelength."""
    if isinstance(scaling, Yarn):
        return _yarn_share(dim, base, scaling)
    turns = scaling.original_positions * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    return 1 - ((turns - scaling.low_freq_factor) / span).clamp(0, 1)


def _yarn_share(dim: int, base: float, yarn: Yarn) -> Tensor:
    """`_stretched_share` of YaRN.

    It is 0 up to the dimension that turns ``beta_fast`` times in the original context, 1 from the
    dimension that turns ``beta_slow`` times, and rises linearly between them.
    """

    def dimension(turns: float) -> float:
        return dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / math.log(base) / 2

    first = dimension(yarn.beta_fast)
    last = dimension(yarn.beta_slow)
    if yarn.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    return ((torch.arange(dim // 2) - first) / (last - first or 1e-3)).clamp(0, 1)
