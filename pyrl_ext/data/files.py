"""Files of records: JSON lines or Parquet, opened once and read record by record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet

SHOWN_PROBLEMS = 50


class DataError(ValueError):
    """All problems of a data file, one a line."""


class Broken(Exception):
    """One record cannot be used: (what, expected rule)."""

    def __str__(self) -> str:
        return f"{self.args[0]}, expected {self.args[1]}"


class Records(Protocol):
    """The records of one file, numbered from 0."""

    path: Path

    def __len__(self) -> int: ...

    def where(self, number: int) -> str:
        """The place of a record, for messages."""
        ...

    def read(self, number: int) -> Any:
        """A record as it was written. Raises: Broken."""
        ...


def open_records(path: str | Path) -> Records:
    """The records of a file.

    Args:
        path: .jsonl (UTF-8, one object a line, blank lines ignored) or .parquet

    Raises:
        DataError: there is no such file, or it is of another kind
    """
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path}: a folder, expected a .jsonl or .parquet file")
    if not path.is_file():
        raise DataError(f"{path}: no such file, expected a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".parquet":
        return ParquetRows(path)
    raise DataError(f"{path}: suffix {path.suffix!r}, expected .jsonl or .parquet")


class JsonLines:
    """Records of a .jsonl file; memory holds where each begins, 24 bytes a record."""

    def __init__(self, path: Path):
        self.path = path
        spans = []
        at = 0
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    spans.append((line, at, len(text)))
                at += len(text)
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def where(self, number: int) -> str:
        """See `Records.where`."""
        return f"{self.path}:{self._spans[number, 0]}"

    def read(self, number: int) -> Any:
        """See `Records.read`."""
        _, start, size = self._spans[number].tolist()
        with self.path.open("rb") as file:
            file.seek(start)
            return _parse(file.read(size).removesuffix(b"\n"))


class ParquetRows:
    """Records of a .parquet file; memory holds one row group, the last that was read.

    Whoever reads many records reads them in rising order, so that each row group is read once.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: {error}, expected a parquet file") from error
        facts = self._file.metadata
        sizes = [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._held = -1
        self._rows = pyarrow.table({})

    def __len__(self) -> int:
        return int(self._starts[-1])

    def where(self, number: int) -> str:
        """See `Records.where`."""
        return f"{self.path}: row {number}"

    def read(self, number: int) -> Any:
        """See `Records.read`; a column that a row does not use is null, the same as an absent
        field."""
        group = int(np.searchsorted(self._starts, number, side="right")) - 1
        if group != self._held:
            # two would be in memory
            self._held = -1
            self._rows = pyarrow.table({})
            try:
                self._rows = self._file.read_row_group(group)
            except (pyarrow.ArrowException, OSError) as error:
                reason = " ".join(str(error).split())
                raise Broken(f"row group {group}: {reason}", "one that can be read") from None
            self._held = group
        (row,) = self._rows.slice(number - int(self._starts[group]), 1).to_pylist()
        return {name: value for name, value in row.items() if value is not None}


def refuse(path: Path, problems: Sequence[str], records: int, broken: int | None = None) -> None:
    """Raise `DataError` if there are ``problems``, or no ``records`` at all.

    Args:
        problems: of records, one a record; at least as many as are shown
        records: number of records in the file
        broken: number of records with problems; None: as many as ``problems``
    """
    broken = len(problems) if broken is None else broken
    if broken:
        shown = problems[:SHOWN_PROBLEMS]
        more = [f"and {broken - len(shown)} more"] if broken > len(shown) else []
        raise DataError(
            f"{path}: {broken} of {records} records cannot be used\n  "
            + "\n  ".join([*shown, *more])
        )
    if not records:
        raise DataError(f"{path}: no records, expected at least one")


def _parse(line: bytes) -> Any:
    rule = "one JSON object a line"
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_distinct)
        if b"\\u" in line:  # the escape of half a character is valid JSON
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        return record
    except UnicodeDecodeError as error:
        raise Broken(
            f"byte {line[error.start]:#04x} at column {error.start + 1}", "UTF-8"
        ) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Broken(f"{half!r}, a lone surrogate", "whole Unicode characters") from None
    except json.JSONDecodeError as error:
        raise Broken(f"{error.msg.removesuffix(' at')} at column {error.colno}", rule) from None
    except RecursionError:
        raise Broken("objects or lists nested too deeply to read", rule) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise Broken(str(error).partition(";")[0], "a shorter number, or a text") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise Broken(f"field {cut(repeated)} repeated", "each field once")
    return record


def cut(value: Any) -> str:
    """`value` as it is written, shortened."""
    shown = repr(value[:80] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
