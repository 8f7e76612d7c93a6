"""AdamW with its moments in bfloat16, for half of their memory and of their way to the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
MOST = 1 << 22  # elements stepped at a time: their moments in float32 take 32 MiB


class Bf16MomentsAdamW(torch.optim.AdamW):
    """torch's AdamW, whose moments are kept in bfloat16 and updated in float32.

    The moments are rounded to nearest after a step, so a step does not depend on how parameters are
    sharded. Without a gradient, a moment with a decay above 0.992 would change by less than the
    distance of two numbers of bfloat16, up to 1/128: the plan rejects such decays.

    megatron-core has this with TransformerEngine's FusedAdam alone (use_precision_aware_optimizer).

    Args:
        groups: parameter groups of AdamW or FusedAdam: float32 parameters (contiguous), lr, betas,
            eps, weight_decay. They are kept, not copied.
    """

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__([torch.zeros(0)], fused=True)
        # torch's way to add groups takes no views, which a distributed optimizer steps
        self.param_groups = groups

    def init_state(self) -> None:
        """Zeros for moments that do not exist yet."""
        for group in self.param_groups:
            for main in group["params"]:
                if not self.state[main]:
                    self.state[main]["step"] = torch.zeros((), device=main.device)
                    for kind in MOMENTS:
                        self.state[main][kind] = torch.zeros_like(main, dtype=torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have a gradient. Never waits for the device."""
        if closure is not None:
            raise ValueError("a closure, expected None: megatron-core steps without one")
        self.init_state()
        for group in self.param_groups:
            for batch in _batches(self._pieces(group)):
                _step(group, batch)
            for main in group["params"]:
                if main.grad is not None:
                    self.state[main]["step"] += 1

    def _pieces(self, group: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Parameter, gradient and moments, all flat, and the number of finished steps, of at most
        `MOST` elements each."""
        for main in group["params"]:
            if main.grad is None:
                continue
            state = self.state[main]
            whole = [main, main.grad, *(state[kind] for kind in MOMENTS)]
            flat = [each.detach().view(-1) for each in whole]
            for start in range(0, main.numel(), MOST):
                yield [each[start : start + MOST] for each in flat] + [state["step"]]


def _batches(pieces: Iterator[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """`pieces` in lists of at most `MOST` elements together."""
    batch = []
    held = 0
    for piece in pieces:
        if batch and held + len(piece[0]) > MOST:
            yield batch
            batch = []
            held = 0
        batch.append(piece)
        held += len(piece[0])
    if batch:
        yield batch


def _step(group: dict[str, Any], batch: list[list[Tensor]]) -> None:
    """One call of torch's fused AdamW for all pieces."""
    mains, gradients, averages, squares, counts = map(list, zip(*batch, strict=True))
    wide_averages = [each.float() for each in averages]
    wide_squares = [each.float() for each in squares]
    adamw(
        mains,
        gradients,
        wide_averages,
        wide_squares,
        [],
        [count.clone() for count in counts],  # which the call increments
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for kept, wide in zip(averages + squares, wide_averages + wide_squares, strict=True):
        kept.copy_(wide)
