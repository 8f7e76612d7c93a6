"""Files that take a step's numbers: JSON lines, TensorBoard.

A row is one step: ``{"step": 3, "reward": 0.5, ...}``.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from pyrl_ext.parallel.atomic_write import no_link, replacing

Row = Mapping[str, float]
MOST_STEPS = 2**53  # the page's numbers have no larger integers

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the row of each step."""

    def write(self, row: Row) -> None:
        """Keep one step's numbers."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class JsonlSink:
    """metrics.jsonl: one strict JSON object a line, flushed at once, steps rising.

    JSON has no NaN and no infinity: such a value is written as null, and its name and text go into
    the row's ``"nonfinite": {"loss": "nan"}``, from which `read_rows` restores it.

    Args:
        path: created with its folder; an existing file is continued, and a last line that a
            crash left half written is removed with a warning.

    Raises: OSError naming the file when it cannot be written; ValueError as `read_rows`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1.0
        if self.path.exists():
            rows = self._repair()
            self._last_step = rows[-1]["step"] if rows else -1.0
        self._file = self._open()

    def _open(self) -> IO[str]:
        return open(self.path, "a", encoding="utf-8", opener=no_link)

    def _repair(self) -> list[dict[str, float]]:
        rows, torn = _parse(self.path)
        if torn is not None:
            log.warning(
                "%s: removed line %d, left half written by an interrupted run: %.80s",
                self.path,
                len(rows) + 1,
                torn,
            )
            self._rewrite(rows)
        return rows

    def write(self, row: Row) -> None:
        """Append one step.

        Raises:
            ValueError: the row has no step, or one that is not after the last.
            TypeError: a value is not a Python number.
        """
        if "step" not in row or not row["step"] > self._last_step:
            raise ValueError(
                f"JsonlSink({self.path}): step {row.get('step')} after {self._last_step:g}, "
                "expected a later one. Call rewind when a run is resumed"
            )
        if not self.path.exists():
            raise OSError(
                f"{self.path}: was deleted while the run wrote to it, expected the run folder to "
                "be left alone; the rows and checkpoints in it are lost. Start the command again"
            )
        try:
            self._file.write(_encode(row))
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"{self.path}: step {row['step']} cannot be written ({error.strerror}), expected "
                "space on its file system. Make room"
            ) from error
        self._last_step = row["step"]

    def rewind(self, step: int) -> int:
        """Drop rows of ``step`` and later, in one atomic replacement of the file; returns the
        number of rows that are left."""
        rows, _ = _parse(self.path)
        kept = [row for row in rows if row["step"] < step]
        if len(kept) < len(rows):
            self._file.close()
            self._rewrite(kept)
            self._file = self._open()
        self._last_step = kept[-1]["step"] if kept else -1.0
        return len(kept)

    def _rewrite(self, rows: list[dict[str, float]]) -> None:
        with replacing(self.path) as partial:
            partial.write_text("".join(map(_encode, rows)), encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def count_rows(path: Path) -> int:
    """Number of rows a metrics.jsonl has; 0 without the file. Raises: ValueError as `read_rows`."""
    return len(read_rows(path)) if path.exists() else 0


def read_rows(path: str | Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, NaN and infinities restored, without a torn last line.

    Raises:
        ValueError: a complete line is not a JSON object of numbers with a step after that of the
            line before, as `JsonlSink` writes them; names the line.
        OSError: it is not a file that can be read.
    """
    return _parse(Path(path))[0]


def _encode(row: Mapping[str, object]) -> str:
    plain: dict[str, object] = {}
    nonfinite = {}
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"JsonlSink: {name} is {value!r}, expected a Python int or float")
        plain[name] = value if math.isfinite(value) else None
        if plain[name] is None:
            nonfinite[name] = str(float(value))
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False) + "\n"


def _decode(line: str, last_step: float) -> dict[str, float]:
    row = json.loads(line)
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError("no object with a step")
    nonfinite = row.pop("nonfinite", {})
    if not isinstance(nonfinite, dict):
        raise ValueError(f"nonfinite is {nonfinite!r}")
    for name, value in nonfinite.items():
        row[name] = float(value)
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r:.80}, not a number")
        float(value)  # integers of more than 308 digits have no float
    step = row["step"]
    if not 0 <= step < MOST_STEPS or step != int(step):
        raise ValueError(f"step is {step}, no whole number from 0 to 2**53")
    if step <= last_step:
        raise ValueError(f"step {step} after {last_step}")
    return row


def _parse(path: Path) -> tuple[list[dict[str, float]], str | None]:
    """All complete rows, and the last line if it is torn (a complete line ends in a newline)."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise OSError(
            f"{path}: cannot be read ({error.strerror}), expected a file of JSON lines. Move it "
            "away"
        ) from error
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(_decode(line, rows[-1]["step"] if rows else -1.0))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path}:{number}: {error}, expected a JSON object of numbers with a rising step"
            ) from error
    return rows, lines[-1] or None


class TensorBoardSink:
    """One TensorBoard scalar a metric.

    Args:
        folder: of the event files.
        first_step: where a resumed run continues; events from this step on are purged.
    """

    def __init__(self, folder: str | Path, first_step: int | None = None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, row: Row) -> None:
        """Write one step."""
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
