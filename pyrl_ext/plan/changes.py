"""``plan_changes.jsonl`` of a run folder: what resumes changed in the plan, and its start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.resume import Difference

FILE = "plan_changes.jsonl"


@dataclass(frozen=True)
class PlanChange:
    """A resume with a changed plan, or the start of a run from another one.

    Args:
        step: rollout steps that were finished.
        time: in ISO format, UTC.
        changed: key -> its value before and now.
        init_from: the checkpoint that the run started from; None: a resume.
        init_optimizer: True if it started with the optimizer state of ``init_from``.
    """

    step: int
    time: str
    changed: dict[str, list[Any]] = field(default_factory=dict)
    init_from: str | None = None
    init_optimizer: bool = False

    @classmethod
    def resume(cls, step: int, differences: Sequence[Difference]) -> PlanChange:
        """The change of a resume at ``step``."""
        return cls(step, _now(), {each.name: [each.saved, each.now] for each in differences})

    @classmethod
    def start(cls, checkpoint: Path, optimizer: bool) -> PlanChange:
        """The start of a run from ``checkpoint``."""
        return cls(0, _now(), {}, str(checkpoint), optimizer)

    @property
    def text(self) -> str:
        """The change in words."""
        if self.init_from is not None:
            state = "weights and optimizer state" if self.init_optimizer else "weights"
            return f"{state} of {self.init_from}"
        pairs = (f"{n} {show(old)} -> {show(new)}" for n, (old, new) in self.changed.items())
        return ", ".join(pairs)

    def to_json(self) -> str:
        """The line of the file."""
        return json.dumps(asdict(self)) + "\n"


def read_changes(folder: Path) -> list[PlanChange]:
    """The changes of a run, the oldest first; none without the file.

    Raises: ValueError naming a line that is none.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(PlanChange(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file}:{number}: {show(line)}, expected a change of the plan as a run writes it "
                f"({error}). Remove the line"
            ) from error
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
