"""The step of a plan: with rollouts, or on the records of a file."""

from __future__ import annotations

from collections.abc import Callable

from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.trainer.sft import SftStep
from pyrl_ext.trainer.step import RolloutStep, Step


def build_step(plan: Plan, topo: Topology, show: Callable[[str], None] | None = None) -> Step:
    """Everything the plan names; bad data, rewards or losses fail before a model is built.

    Args:
        show: takes a line of text as samples come.
    """
    if plan.has_rollouts:
        return RolloutStep.build(plan, topo, show)
    return SftStep.build(plan, topo)
