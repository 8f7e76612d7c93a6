"""The phases of a step, and what the trainer holds in which of them."""

from __future__ import annotations

from typing import Literal

# In order. The metrics of a run have the same names, after `time/`.
STEP_PHASES = ("publish", "rollout", "old_logprobs", "ref_logprobs", "teacher_logprobs", "update")

# Both log-prob passes hold the same memory, so there they are one phase.
MEMORY_PHASES = ("publish", "rollout", "logprobs", "update")

# Before the first step, where the engine uses the trainer's GPUs: it starts while they are empty,
# and sleeps, if it may, while the trainer is built, which then holds no more than in an update.
START = "start"

# Of a run without rollouts.
WITHOUT_ROLLOUTS = ("update",)

# A part of the trainer's state that can leave the device.
Offloadable = Literal["weights", "gradients", "optimizer"]

# rollout.offload_trainer -> what of the trainer's state leaves the device during the rollout.
OFFLOADED: dict[str, tuple[Offloadable, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("optimizer", "gradients", "weights"),
}
