"""Items of a rank's memory, and those that every module has: its state and its process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyrl_ext.plan.groups import communicators, foreign
from pyrl_ext.plan.model.units import GIB
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
    """Formula of the number, or assumption of the estimate."""
    exact: bool = True
    """Computed from tensor shapes; False: estimated."""
    host: bool = False
    """In host memory, not on the device."""


def state_items(
    plan: Plan, count: int, trained: int, stepped: int, of: str = "", by_muon: int = 0
) -> Iterator[Item]:
    """Weights, gradients and optimizer state. Gradients are accumulated in float32; Adam keeps two
    moments, Muon one in float32, and both a float32 copy of weights that are not float32
    themselves.

    Args:
        count: parameters that the rank holds.
        trained: those that have gradients.
        stepped: those whose optimizer state it holds.
        of: ends the names of the items.
        by_muon: those of `stepped` that Muon steps.
    """
    weight = plan.weight_bytes
    parts = [("weights", weight, count, 0)]
    if trained:
        parts += [
            ("gradients", 4, trained, 0),
            ("optimizer", plan.optimizer_bytes, stepped, 4 * by_muon),
        ]
    for name, width, number, less in parts:
        held = width * number - less
        why = f"{width} bytes a parameter ({number:,})"
        if less:
            why += f", 4 fewer of those that Muon steps ({by_muon:,})"
        if name not in OFFLOADED[plan.rollout.offload_trainer]:
            yield Item(f"{name}{of}", held, MEMORY_PHASES, why)
            continue
        # the engine reads the weights before they go
        offloaded = ("rollout",) if name == "weights" else ("publish", "rollout")
        onloaded = tuple(phase for phase in MEMORY_PHASES if phase not in offloaded)
        yield Item(f"{name}{of}", held, onloaded, f"{why}, offloaded in other phases")
        if name != "gradients":  # the next update sets them to zero, so they are dropped
            why += "; torch keeps pinned memory"
            yield Item(f"{name}{of} on the host", held, MEMORY_PHASES, why, host=True)
    if plan.objective.kl_coef > 0 and plan.lora is None:
        since = "of an earlier step" if plan.objective.reference_refresh else "at the start"
        why = f"the weights {since}, kept because objective.kl_coef is above 0"
        yield from frozen_items(plan, f"reference{of}", weight * count, why)


def frozen_items(plan: Plan, name: str, held: int, why: str) -> Iterator[Item]:
    """Weights that no step changes and the engine does not read."""
    if "weights" not in OFFLOADED[plan.rollout.offload_trainer]:
        yield Item(name, held, MEMORY_PHASES, why)
        return
    yield Item(name, held, PASSES, f"{why}, offloaded in other phases")
    pinned = f"{why}; torch keeps pinned memory"
    yield Item(f"{name} on the host", held, MEMORY_PHASES, pinned, host=True)


def context(plan: Plan, rank: int) -> Iterator[Item]:
    """Memory of CUDA and NCCL on `rank`, and of communicators that an engine suspends."""
    if plan.device != "cuda":
        return
    of_engine = foreign(plan, rank)
    suspended = sum(each.suspended for each in of_engine)
    number = communicators(plan, rank) + len(of_engine) - suspended
    why = f"assumed: 1 GiB, and 0.25 GiB for each of {number} NCCL communicators"
    held = CONTEXT_BYTES + number * COMMUNICATOR_BYTES
    yield Item("CUDA and NCCL", held, (START, *MEMORY_PHASES), why, exact=False)
    if suspended:
        why = f"assumed: 0.25 GiB for each of {suspended} communicators, suspended in its sleep"
        awake = (START, *MEMORY_PHASES[:2])
        held = suspended * COMMUNICATOR_BYTES
        yield Item("NCCL of the engine", held, awake, why, exact=False)
