"""An ``objective`` section and random inputs of a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyrl_ext.loss.inputs import LossInputs


@dataclass(frozen=True)
class Objective:
    """An ``objective`` section."""

    advantage: str = "grpo"
    normalize_std: bool = True
    loss: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    tis_cap: float | None = None


def loss_case(n: int = 40, seed: int = 0, scale: float = 0.4) -> tuple[Tensor, Tensor, LossInputs]:
    gen = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(n, generator=gen, dtype=torch.float64)

    logprobs = draw() - 2
    fields = LossInputs(
        old_logprobs=logprobs + scale * draw(),
        rollout_logprobs=logprobs + scale * draw(),
        ref_logprobs=logprobs + scale * draw(),
        advantages=draw(),
        loss_mask=draw() > -0.5,
    )
    return logprobs, draw().abs(), fields
