"""Engines that run apart from the trainer, and training while they generate."""

from __future__ import annotations

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, rule
from pyrl_ext.plan.schema.servers import Servers


@rule("rollout")
def engines_apart_are_built(plan: Plan) -> Found:
    for name in Servers.model_fields:
        if changed(plan.rollout, name):
            value = show(getattr(plan.rollout, name))
            yield name, f"{value}, expected it left out; engines apart are not built yet"
