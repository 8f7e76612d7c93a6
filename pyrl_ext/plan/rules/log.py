"""The records of a run besides metrics.jsonl."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule


@rule("log.profile")
def profiled_steps_are_steps_of_the_run(plan: Plan) -> Found:
    late = [step for step in plan.log.profile if step >= plan.steps]
    if late:
        return f"{late[0]} with steps {plan.steps}, expected steps from 0 to {plan.steps - 1}"
