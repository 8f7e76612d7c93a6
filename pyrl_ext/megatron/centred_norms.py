"""Norms whose weights are centred at zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyrl_ext.megatron.local_layers import RMSNorm
from pyrl_ext.ops import rms_norm, rms_norm_residual


class CentredNorm(RMSNorm):
    """It multiplies by 1 + weight. That sum is in float32, and so are the rows: of a small weight
    beside 1, bfloat16 would keep little."""

    def forward(self, x: Tensor) -> Any:
        return rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)  # type: ignore[arg-type]


class CentredResidualNorm(CentredNorm):
    """`ResidualNorm`, multiplying by 1 + weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        both = rms_norm_residual(x.float(), 1 + self.weight.float(), self.eps)  # type: ignore[arg-type]
        return tuple(each.to(x.dtype) for each in both)
