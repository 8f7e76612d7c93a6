"""The optimizer's schedule."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule


@rule("optimizer.warmup_steps")
def warmup_ends(plan: Plan) -> Found:
    updates = plan.steps * plan.batching.minibatches
    if plan.optimizer.warmup_steps > updates:
        return (
            f"{plan.optimizer.warmup_steps}, expected at most {updates}, the optimizer steps of "
            f"the run (steps {plan.steps} * minibatches {plan.batching.minibatches}); lr would not "
            "be reached"
        )
