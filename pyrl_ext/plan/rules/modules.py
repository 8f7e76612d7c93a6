"""Encoders beside the language model: their names, ranks and microbatches."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, rule


@rule("modules")
def the_family_has_the_modules(plan: Plan) -> Found:
    known = {"vision"} if plan.sizes.vision else set()
    for name in plan.modules.keys() - known:
        rule = f"expected {' or '.join(known) or 'none'}"
        yield name, f"not a module of {plan.model.family} {in_config(plan)}, {rule}"
