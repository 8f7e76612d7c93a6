"""The records of a run besides metrics.jsonl."""

from __future__ import annotations

from importlib.util import find_spec

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule


@rule("log.profile")
def profiled_steps_are_steps_of_the_run(plan: Plan) -> Found:
    late = [step for step in plan.log.profile if step >= plan.steps]
    if late:
        return f"{late[0]} with steps {plan.steps}, expected steps from 0 to {plan.steps - 1}"


def wandb_problems(plan: Plan) -> list[str]:
    """Why `plan` cannot log to Weights & Biases here."""
    spec = find_spec("wandb") if plan.log.wandb else None
    if not plan.log.wandb or (spec and spec.origin):  # no origin: a folder that wandb wrote
        return []
    return ["log.wandb: wandb is not installed, expected it. Run: pip install wandb"]
