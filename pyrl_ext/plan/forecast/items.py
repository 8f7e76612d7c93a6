"""Items of a rank's memory, and those that every module has: its state and its process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pyrl_ext.plan.forecast.units import DTYPE_BYTES, GIB
from pyrl_ext.plan.groups import communicators, foreign
from pyrl_ext.plan.phases import MEMORY_PHASES, OFFLOADED, START
from pyrl_ext.plan.plan import Plan

PASSES = ("logprobs", "update")

# GPU memory that a process takes before it computes (CUDA's context, libraries and their
# workspaces), and the buffers of one NCCL communicator. Assumed, not measured.
CONTEXT_BYTES = GIB
COMMUNICATOR_BYTES = GIB // 4


@dataclass(frozen=True)
class Item:
    """Bytes with one purpose on a rank."""

    name: str
    bytes: int
    phases: tuple[str, ...]
    """Phases in which they are held, of `START` and `MEMORY_PHASES`."""
    why: str
    """How the number is computed, or what the estimate assumes."""
    exact: bool = True
    """Computed from tensor shapes; False: estimated."""
    host: bool = False
    """In host memory, not on the device."""


def state_items(plan: Plan, count: int, trained: int, stepped: int, of: str = "") -> Iterator[Item]:
    """Weights, gradients and optimizer state. Gradients are accumulated in float32; Adam keeps two
    float32 moments, and a float32 copy of weights that are not float32 themselves.

    Args:
        count: parameters that the rank holds.
        trained: those that have gradients.
        stepped: those whose optimizer state it holds.
        of: ends the names of the items.
    """
    weight = DTYPE_BYTES[plan.model.dtype]
    adam = 8 if weight == 4 else 12
    part = " of the rank's part" if plan.optimizer.distributed else ""
    on_host = math.ceil(plan.optimizer.offload * stepped)
    some = "" if trained == count else f" of adapters ({trained:,})"
    for name, held, why in (
        ("weights", weight * count, f"{weight} bytes a parameter ({count:,})"),
        ("gradients", 4 * trained, f"4 bytes a parameter{some}, reduced in place"),
        ("optimizer", adam * (stepped - on_host), f"{adam} bytes a parameter{part} ({stepped:,})"),
    )[: 3 if trained else 1]:
        if name in OFFLOADED[plan.rollout.offload_trainer]:
            # the engine reads the weights before they go
            offloaded = ("rollout",) if name == "weights" else ("publish", "rollout")
            onloaded = tuple(phase for phase in MEMORY_PHASES if phase not in offloaded)
            if name == "gradients":  # of no use until the next update sets them to zero
                yield Item(f"{name}{of}", held, onloaded, f"{why}; dropped in other phases")
                continue
            yield Item(f"{name}{of}", held, onloaded, f"{why}; in host memory in other phases")
            why += "; torch keeps pinned memory once it has it"
            yield Item(f"{name}{of} on the host", held, MEMORY_PHASES, why, host=True)
        else:
            yield Item(f"{name}{of}", held, MEMORY_PHASES, why)
    if on_host:
        why = "16 bytes a parameter: weight, gradient and two moments in float32"
        name = "optimizer"
        held = 16 * on_host
        yield Item(f"offloaded {name}{of}", held, MEMORY_PHASES, why, exact=False, host=True)
    if plan.objective.kl_coef > 0 and plan.lora is None:
        why = "the initial weights, kept because objective.kl_coef is above 0"
        yield Item(f"reference{of}", weight * count, MEMORY_PHASES, why)


def context(plan: Plan, rank: int) -> Iterator[Item]:
    """Memory of CUDA and NCCL on `rank`, and of communicators that an engine suspends."""
    if plan.device != "cuda":
        return
    theirs = foreign(plan, rank)
    suspended = sum(each.suspended for each in theirs)
    number = communicators(plan, rank) + len(theirs) - suspended
    why = f"assumed: 1 GiB, and 0.25 GiB for each of {number} NCCL communicators"
    if len(theirs) > suspended:
        why += f", {len(theirs) - suspended} of them the engine's or to it"
    held = CONTEXT_BYTES + number * COMMUNICATOR_BYTES
    yield Item("CUDA and NCCL", held, (START, *MEMORY_PHASES), why, exact=False)
    if suspended:
        why = f"assumed: 0.25 GiB for each of {suspended} NCCL communicators of the engine"
        held = suspended * COMMUNICATOR_BYTES
        awake = (START, *MEMORY_PHASES[:2])
        yield Item("NCCL of the engine", held, awake, f"{why}, suspended in its sleep", exact=False)
