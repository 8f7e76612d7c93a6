"""The metrics of a run, for comparison with another run of the same plan."""

from pathlib import Path
from typing import Any

from pyrl_ext.metrics.glossary import check_names
from pyrl_ext.metrics.sinks import read_rows

MEASURED = ("time/", "tokens_per_s", "memory/peak", "scoring/call", "scoring/wait_seconds")
"""Names of metrics that the machine decides, too, begin so."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, all of whose metrics have a definition."""
    rows = read_rows(folder / "metrics.jsonl")
    check_names(set().union(*rows))
    return rows


def numbers(folder: Path, *apart: str) -> list[dict[str, Any]]:
    """`rows_of` without what is measured, and without names that begin with one of ``apart``."""
    others = MEASURED + apart
    return [{k: v for k, v in row.items() if not k.startswith(others)} for row in rows_of(folder)]
