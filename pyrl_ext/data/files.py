"""Files of records: JSON lines or Parquet, opened once and read record by record."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet

from pyrl_ext.plan.records import Broken, Mistakes, cut, parse

__all__ = ["Broken", "DataError", "Records", "cut", "open_records", "refuse"]


class DataError(ValueError):
    """All problems of a data file, one a line."""


class Records(Protocol):
    """The records of one file or folder, numbered from 0."""

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
    kinds: dict[str, Callable[[Path], Records]] = {".jsonl": JsonLines, ".parquet": ParquetRows}
    if path.suffix not in kinds or not path.is_file():
        fault = "a folder" if path.is_dir() else "no such file"
        if path.is_file():
            fault = f"suffix {path.suffix!r}"
        raise DataError(f"{path}: {fault}, expected a .jsonl or .parquet file")
    return kinds[path.suffix](path)


class JsonLines:
    """Records of a .jsonl file; memory holds where each begins, 24 bytes a record."""

    def __init__(self, path: Path):
        self.path = path
        spans = array("q")  # line, first byte, bytes of each record
        start = 0
        with path.open("rb") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    spans.extend((line, start, len(text)))
                start += len(text)
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
            line = file.read(size).removesuffix(b"\n")
        return parse(line)


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
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = [0, *accumulate(sizes)]
        self._group = -1
        self._rows = pyarrow.table({})

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, number: int) -> str:
        """See `Records.where`."""
        return f"{self.path}: row {number}"

    def read(self, number: int) -> Any:
        """See `Records.read`; a column that a row does not use is null, the same as an absent
        field."""
        group = bisect_right(self._starts, number) - 1
        if group != self._group:
            self._rows = pyarrow.table({})  # two row groups would be in memory
            self._group = -1
            try:
                self._rows = self._file.read_row_group(group)
            except (pyarrow.ArrowException, OSError) as error:
                reason = " ".join(str(error).split())
                raise Broken(f"row group {group}: {reason}", "one that can be read") from None
            self._group = group
        (row,) = self._rows.slice(number - self._starts[group], 1).to_pylist()
        return {name: value for name, value in row.items() if value is not None}


def refuse(path: Path, mistakes: Mistakes, records: int) -> None:
    """Raise `DataError` if there are ``mistakes``, or no ``records`` at all.

    Args:
        records: number of records in the file
    """
    if mistakes.broken:
        lines = [f"{path}: {mistakes.broken} of {records} records cannot be used"]
        lines += [f"  {line}" for line in mistakes.lines(f"{records} records")]
        raise DataError("\n".join(lines))
    if not records:
        raise DataError(f"{path}: no records, expected at least one")
