"""How a run continues, and what it starts from."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.resume import allow_problems
from pyrl_ext.plan.rules._rule import Found, rule


@rule("resume_allow")
def allowed_keys_can_change(plan: Plan) -> Found:
    return allow_problems(plan.resume_allow)


@rule("init_optimizer")
def optimizer_state_comes_with_weights(plan: Plan) -> Found:
    if plan.init_optimizer and plan.init_from is None:
        return "true with init_from null, expected false; there is no run to take the state from"
