"""The metrics of a run, for comparison with another run of the same plan."""

from pathlib import Path
from typing import Any

from pyrl_ext.metrics.glossary import check_names
from pyrl_ext.metrics.sinks import read_rows

MEASURED = ("time/", "tokens_per_s", "memory/peak")
"""Names of metrics that the machine decides, too, begin so."""


def numbers(folder: Path, *apart: str) -> list[dict[str, Any]]:
    """The rows of a run without what is measured, and without names that begin with one of
    ``apart``; every metric has a definition."""
    rows = read_rows(folder / "metrics.jsonl")
    check_names(set().union(*rows))
    others = MEASURED + apart
    return [{k: v for k, v in row.items() if not k.startswith(others)} for row in rows]
