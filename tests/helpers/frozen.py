"""Runs with `model.freeze`, and the same runs with the gradients of those weights cleared."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pyrl_ext.loss.registry import build_loss
from pyrl_ext.pack.schedule import Scheduler
from pyrl_ext.plan import Plan
from pyrl_ext.trainer.policy import Policy
from tests.helpers import passes
from tests.parity import batches

# of qwen3_moe: the first stage as a whole where it has one layer, experts, routers, fused tensors
PATTERNS = (
    "model.embed_tokens.weight",
    "model.layers.0.*",
    "*.mlp.gate.weight",
    "model.layers.2.mlp.experts.*",
    "model.layers.3.self_attn.[qkv]_proj.weight",
)
FREEZE = f"model.freeze=[{', '.join(repr(pattern) for pattern in PATTERNS)}]"


class FrozenRun(NamedTuple):
    """The tensors of a run, whole, by checkpoint name.

    Args:
        start: initial weights.
        end: after three steps.
        resumed: after three steps, of which the last followed a checkpoint.
        cleared: after three steps without `model.freeze`, with cleared gradients in its place.
        norms: gradient norm of each step with `model.freeze`, and of those without it.
        trained: numbers in this rank's gradient buffers.
    """

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    resumed: dict[str, Tensor]
    cleared: dict[str, Tensor]
    norms: tuple[list[float], list[float]]
    trained: int


def frozen_run(frozen: Plan, plain: Plan, folder: Path) -> FrozenRun:
    """Three steps on the batches of `tests.parity`, with and without `model.freeze`."""
    with passes.built(frozen) as policy:
        start = whole(policy)
        trained = sum(
            tensor.main_grad.numel()
            for chunk in policy.llm.chunks
            for tensor in chunk.parameters()
            if hasattr(tensor, "main_grad")
        )
        norms = train(policy, 0, 2)
        policy.save(folder / "step-2")
        norms += train(policy, 2, 3)
        end = whole(policy)
    with passes.built(frozen, initial=False) as policy:
        policy.load(folder / "step-2")
        train(policy, 2, 3)
        resumed = whole(policy)
    with passes.built(plain) as policy:
        norms_cleared = train(policy, 0, 3, frozen.frozen)
        cleared = whole(policy)
    return FrozenRun(start, end, resumed, cleared, (norms, norms_cleared), trained)


def train(
    policy: Policy, first: int, last: int, cleared: frozenset[str] = frozenset()
) -> list[float]:
    """Steps ``first`` to ``last``; the gradients of the tensors ``cleared`` are set to 0.

    Returns: the gradient norm of each step.
    """
    plan = policy.plan
    loss = build_loss(plan.objective)
    norms: list[float] = []
    for batch in batches(plan, mtp_routes=False)[first:last]:
        schedule = Scheduler(plan).schedule(batch.seqlens)
        passes.accumulate(policy, batch, schedule, loss)
        for name, tensor in policy.llm.named_parameters().items():
            if name in cleared and hasattr(tensor, "main_grad"):  # the routers' bias has none
                tensor.main_grad.zero_()  # type: ignore[attr-defined]
        norms.append(policy.step_optimizer()["grad_norm"])
    return norms


def whole(policy: Policy) -> dict[str, Tensor]:
    """Every weight, copied."""
    return {name: tensor.clone() for name, tensor in policy.weights()}


def equal_names(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that are equal to the bit."""
    return {name for name in one if torch.equal(one[name], other[name])}
