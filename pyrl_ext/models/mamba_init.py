"""How tensors of layers with states start without a checkpoint, as transformers draws them."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Generator, Tensor

STEPS = math.log(0.001), math.log(0.1)


def _decays(tensor: Tensor, numbers: Generator) -> Tensor:
    """The logarithms of numbers of which each is as likely from 0.01 to 16."""
    return tensor.uniform_(0.01, 16, generator=numbers).log_()


def _steps(tensor: Tensor, numbers: Generator) -> Tensor:
    """The numbers whose softplus, steps of time, have logarithms of which each is as likely."""
    return tensor.uniform_(*STEPS, generator=numbers).exp_().expm1_().log_()


STARTS: dict[str | None, Callable[[Tensor, Generator], Tensor]] = {
    "decays": _decays,
    "steps": _steps,
}
