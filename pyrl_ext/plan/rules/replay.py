"""Routes: who makes them, and that they are those of this model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, relative, rule


@rule("replay")
def replay_needs_routers(plan: Plan) -> Found:
    if plan.replay.enabled and not plan.router_layers:
        return f"on, expected a model with routers {in_config(plan)}. Use replay: off"


@rule("rollout.path")
def recorded_routes_are_of_this_model(plan: Plan) -> Found:
    """Of the first file; the others are looked at when they are read."""
    path = plan.recorded_path
    if not (plan.replay.enabled and plan.rollout.engine == "recorded" and path):
        return None
    files = sorted(Path(path).glob("*.safetensors")) if os.path.isdir(path) else [Path(path)]
    header = _safetensors_header(files[0]) if files else None
    if header is None:
        return None  # the engine says what is wrong with such a file
    shown = relative(str(files[0]))
    if "routes" not in header:
        return (
            f"{shown} has no routes, expected them with replay on; the trainer's routers would "
            "choose on their own. Record with routes, or use replay: off"
        )
    found, wanted = header["routes"]["shape"][1:], [len(plan.router_layers), plan.shape.topk]
    if found != wanted:
        return (
            f"{shown} has routes of {found[0]} layers x {found[1]} experts, expected {wanted[0]} "
            f"x {wanted[1]} {in_config(plan)}; they were recorded with another model"
        )


def _safetensors_header(file: Path) -> dict[str, Any] | None:
    """Name -> dtype and shape of the tensors in `file`, or None where it is not such a file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            return json.loads(opened.read(min(size, 100_000_000)))
    except (OSError, ValueError):
        return None
