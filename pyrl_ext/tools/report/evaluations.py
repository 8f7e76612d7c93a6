"""Results that `pyrl eval` left in a run folder, as rows of the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyrl_ext.tools.report.state import Folder

RESULTS = Path("eval", "results.jsonl")


@dataclass(frozen=True)
class ShownEvaluation:
    """One set of one call of `pyrl eval`, in texts."""

    run: int
    time: str
    weights: str
    name: str
    prompts: str
    samples: str
    sampling: str
    reward: str
    passes: str
    truncated: str
    length: str


def evaluations(run: int, folder: Folder) -> list[ShownEvaluation]:
    """The rows of a run, oldest first. Raises: ValueError naming a line that is no result."""
    file = folder.path / RESULTS
    if not file.exists():
        return []
    shown: list[ShownEvaluation] = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            for name, result in row["sets"].items():
                shown.append(_shown(run, row, name, result))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{file}:{number}: {error!r}, expected a result of eval") from error
    return shown


def _shown(run: int, row: dict[str, Any], name: str, result: dict[str, Any]) -> ShownEvaluation:
    passes = [f"pass@{k} {_estimate(each)}" for k, each in result["passes"].items()]
    temperature = result["temperature"]
    return ShownEvaluation(
        run=run,
        time=row["time"].replace("T", " ")[:16],
        weights=Path(row["weights"]).name,
        name=name,
        prompts=str(result["prompts"]),
        samples=str(result["samples"]),
        sampling=f"temperature {temperature:g}" if temperature else "greedy",
        reward=_estimate(result["reward"]),
        passes=", ".join(passes),
        truncated=_number(result["truncated"], ".1%"),
        length=_number(result["length"], ".1f"),
    )


def _estimate(found: dict[str, float | None]) -> str:
    error = "" if found["error"] is None else f" ± {found['error']:.3f}"
    return _number(found["mean"], ".3f") + error


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
