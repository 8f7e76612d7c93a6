"""The optimizer's schedule."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule


@rule("optimizer.warmup_steps")
def warmup_ends(plan: Plan) -> Found:
    if plan.optimizer.warmup_steps > plan.optimizer_steps:
        return f"{plan.optimizer.warmup_steps}, {_at_most(plan, 0)}; lr would not be reached"


@rule("optimizer.decay_steps")
def decay_follows_the_warmup(plan: Plan) -> Found:
    options = plan.optimizer
    if options.schedule != "wsd":
        if options.decay_steps:
            rule = "expected 0; only wsd reads it, the others fall from the warmup to the end"
            return f"{options.decay_steps} with schedule {options.schedule}, {rule}"
        return None
    if not options.decay_steps:
        return "0 with schedule wsd, expected the optimizer steps of decay at the end of the run"
    if options.warmup_steps + options.decay_steps > plan.optimizer_steps:
        return f"{options.decay_steps}, {_at_most(plan, options.warmup_steps)}"


@rule("optimizer.min_lr")
def the_learning_rate_falls(plan: Plan) -> Found:
    least = plan.optimizer.min_lr
    if plan.optimizer.schedule == "constant":
        if least:
            yield f"{least:g} with schedule constant, expected 0; linear, cosine and wsd read it"
        return
    for name in ("llm", *plan.modules):
        if least > (lr := plan.learning_rate(name).lr):
            yield f"{least:g}, expected at most the learning rate {lr:g} of {name}"


def _at_most(plan: Plan, before: int) -> str:
    """The rule that a number of optimizer steps is within the run, after `before` others."""
    rest = f" less {before} of warmup" if before else ""
    factors = f"steps {plan.steps} * minibatches {plan.batching.minibatches}"
    if plan.has_rollouts:
        factors += f" * epochs {plan.batching.epochs}"
    return (
        f"expected at most {plan.optimizer_steps - before}, the optimizer steps of the run "
        f"({factors}){rest}"
    )
