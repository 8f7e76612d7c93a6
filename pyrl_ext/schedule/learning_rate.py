"""The learning rate of each optimizer step: a warmup, then a schedule down to its smallest value.

The values are those of megatron-core's `OptimizerParamScheduler` whose decay takes a step more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True)
class LearningRate:
    """The learning rate over a run.

    Args:
        lr: after the warmup
        min_lr: reached right after the last step, except with a constant schedule
        schedule: linear and cosine fall from the warmup's end to the run's end; wsd (warmup,
            stable, decay) stays at ``lr`` until ``decay_steps`` before the end, then falls linearly
        warmup_steps: of linear rise from ``lr / warmup_steps`` [optimizer steps]
        decay_steps: of wsd [optimizer steps]
        steps: of the whole run [optimizer steps]
    """

    lr: float
    min_lr: float
    schedule: Schedule
    warmup_steps: int
    decay_steps: int
    steps: int

    @property
    def is_constant(self) -> bool:
        """True if every step has the same rate."""
        rises = self.warmup_steps > 1
        falls = self.schedule != "constant" and self.min_lr < self.lr
        return self.lr == 0 or not (rises or falls)

    @property
    def decay_begin(self) -> int:
        """The 0-based step at which the decay begins; a constant schedule has none: ``steps``."""
        if self.schedule == "constant":
            return self.steps
        if self.schedule == "wsd":
            return self.steps - self.decay_steps
        return self.warmup_steps

    def __call__(self, step: int) -> float:
        """The learning rate of the 0-based ``step``; after the last one it stays as it is."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        begin = self.decay_begin
        done = (step + 1 - begin) / (self.steps + 1 - begin)  # the last step still learns
        done = min(1.0, max(0.0, done))
        left = 1 - done
        if self.schedule == "cosine":
            left = (math.cos(math.pi * done) + 1) / 2
        return self.min_lr + left * (self.lr - self.min_lr)
