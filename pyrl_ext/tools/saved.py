"""A run's checkpoint and its plan, for commands that go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyrl_ext.megatron import checkpoint
from pyrl_ext.plan import Plan


def find(run: Path, step: int | None, command: str) -> Path:
    """The checkpoint of ``step``, or the newest, of a run folder.

    Args:
        command: for the message

    Raises: FileNotFoundError.
    """
    folder = run / "checkpoints"
    found = checkpoint.latest(folder) if step is None else folder / f"step-{step}"
    if found is None or not (found / checkpoint.PLAN).exists():
        there = ", ".join(sorted(p.name for p in folder.glob("step-*") if not p.suffix)) or "none"
        raise FileNotFoundError(
            f"{command}: {found or folder} holds no checkpoint (there: {there}), expected the "
            "folder of a run that saved one"
        )
    return found


def on_one_rank(saved: Plan) -> dict[str, Any]:
    """Changes to a plan, for `changed_plan`, after which one process computes everything."""
    shared = {"parallel": {}, "ranks": "shared"}
    modules = {name: keys.model_dump() | shared for name, keys in saved.modules.items()}
    return {"parallel": {}, "modules": modules, "threads": 0}
