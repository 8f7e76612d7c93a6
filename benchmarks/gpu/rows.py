"""Rows of the report, which a job writes one by one, so that what it found outlives it."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# environment variables of a job: where its rows go, and the folder of the report
FILE = "PYRL_GPU_ROWS"
FOLDER = "PYRL_GPU_FOLDER"
LOG_LINES = 12
OK = "ok"
MISSED = "missed"
FAILED = "failed"
ABSENT = "not run"


def note(name: str, state: str = OK, why: str = "", **numbers: Any) -> None:
    """Write a row.

    Args:
        state:   ``ok``; ``missed``: a bar; ``failed``; ``not run``: something that it needs is not
            there.
        why:     the reason of a state other than ``ok``.
        numbers: what was measured, by name with unit.
    """
    row = {"name": name, "state": state, "why": why, "numbers": numbers}
    shown = "  ".join(f"{key} {_short(value)}" for key, value in numbers.items())
    print(f"{state:8s} {name}  {shown}  {why}".rstrip(), flush=True)
    if path := os.environ.get(FILE):
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def noting(name: str) -> Iterator[None]:
    """Turn an error inside the ``with`` block into a failed row, and go on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        note(name, FAILED, first_line(error))


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that a job wrote; a line that it was cut off in is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
