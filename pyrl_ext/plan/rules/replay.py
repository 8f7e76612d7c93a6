"""Routes: who makes them, and that they are those of this model."""

from __future__ import annotations

import json
from pathlib import Path

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, relative, rule


@rule("replay")
def replay_needs_routers(plan: Plan) -> Found:
    shown = plan.replay.summary
    if plan.replay.enabled and not plan.router_layers:
        return f"{shown}, expected a model with routers {in_config(plan)}. Use replay: off"


@rule("replay")
def routes_of_the_trainer_come_from_the_old_pass(plan: Plan) -> Found:
    replay = plan.replay
    if replay.source == "engine":
        return
    if replay.old:
        yield (
            "old",
            "on with source trainer, expected off; its routers choose the experts that the later "
            "passes replay. Use replay: trainer",
        )
    if not replay.train:
        yield (
            "train",
            "off with source trainer, expected on; no update would replay the recorded routes. Use "
            "replay: trainer, or replay: off",
        )


@rule("rollout.path")
def recorded_routes_are_of_this_model(plan: Plan) -> Found:
    """Checks the first file; the others are looked at when they are read."""
    path = plan.recorded_path
    if not (plan.replay.of_engine and plan.rollout.engine == "recorded" and path):
        return None
    first = min(Path(path).glob("*.safetensors"), default=Path(path))
    if (shapes := _shapes(first)) is None:
        return None  # the engine says what is wrong with such a file
    shown = relative(str(first))
    if "routes" not in shapes:
        return (
            f"{shown} has no routes, expected them with replay on; the trainer's routers would "
            "choose on their own. Record with routes, or use replay: off"
        )
    found = shapes["routes"][1:]
    wanted = [len(plan.router_layers), plan.sizes.topk]
    if found != wanted:
        of = " x ".join(map(str, found))
        return (
            f"{shown} has routes of {of} (layers x experts), expected {wanted[0]} x {wanted[1]} "
            f"{in_config(plan)}; they were recorded with another model. Record them with this one"
        )


def _shapes(file: Path) -> dict[str, list[int]] | None:
    """Name -> shape of the tensors in a safetensors file, or None where it is not such a file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size) if size < file.stat().st_size else "")
        return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
