"""Random inputs of a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrl_ext.loss.inputs import LossInputs


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
