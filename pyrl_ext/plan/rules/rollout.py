"""The engine, and the routes it returns."""

from __future__ import annotations

import os

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, relative, rule


@rule("rollout.path")
def recorded_samples_exist(plan: Plan) -> Found:
    engine, path = plan.rollout.engine, plan.recorded_path
    if engine == "recorded" and path is None:
        return "null with engine recorded, expected the recorded samples"
    if engine != "recorded" and path is not None:
        return f"{plan.rollout.path!r} with engine {engine}, expected null; it would not be read"
    if path is not None and not os.path.exists(path):
        return f"{relative(path)} does not exist, expected the recorded samples"


@rule("replay")
def replay_needs_routers(plan: Plan) -> Found:
    if plan.replay.enabled and not plan.router_layers:
        return f"on, expected a model with routers {in_config(plan)}. Use replay: off"
