"""Records of data files: the fields that they need, and mistakes that many of them share."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyrl_ext.plan.language.paths import relative

SHOWN_PROBLEMS = 50
LISTED_PLACES = 3  # of records that share a mistake; of more than these, the first one and a count
LOOKED_AT = 100  # first records that a plan looks at
_LONGEST = 1_000_000  # bytes of a record that a plan reads


_KINDS = {
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    type(None): "null",
}
"""Values of JSON other than objects."""


_QUESTIONS = ("question", "problem", "query", "instruction", "input", "text")
"""Names of the prompt in other formats."""


class Broken(ValueError):
    """One record, or conversation, cannot be used: (what, expected rule)."""

    def __str__(self) -> str:
        return f"{self.args[0]}, expected {self.args[1]}"


def parse(line: bytes) -> Any:
    """The record on a line of a .jsonl file. Raises: Broken."""
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
        if b"\\u" in line:  # the escape of half a character is valid JSON
            json.dumps(record, ensure_ascii=False).encode("utf-8")
        return record
    except Broken:
        raise
    except (ValueError, RecursionError) as error:
        rule = "one JSON object a line, in UTF-8"
        raise Broken(f"{type(error).__name__}: {error}", rule) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def check_fields(record: Any, rollouts: bool) -> dict[str, Any]:
    """The record, if it has the fields that it needs.

    Args:
        rollouts: it is a prompt; False: it is trained on as it is

    Raises: Broken.
    """
    if not isinstance(record, dict):
        raise Broken(f"{_KINDS[type(record)]}", "a JSON object")
    fields: dict[str, Any] = record
    other = "prompt" if rollouts else "tokens"
    if (other in fields) == ("messages" in fields):
        has = ", ".join(fields) or "nothing"
        rule = "either `prompt` or `messages`"
        if not rollouts:
            rule = "either `messages`, or `tokens` and `loss_mask`"
        raise Broken(f"fields {has[:200]}", rule + _renaming(fields, rollouts))
    return fields


def _renaming(fields: Collection[str], rollouts: bool) -> str:
    """Advice, as a sentence, for a record with fields of other formats."""
    given = [name for name in _QUESTIONS if name in fields]
    if rollouts and given and "prompt" not in fields:
        return f". Set data.columns: {{prompt: {given[0]}}}, or rename `{given[0]}` to `prompt`"
    if not rollouts and "prompt" in fields and "messages" not in fields:
        return ". Write `prompt` as a message of the user, and the answer as one of the assistant"
    return ""


def rename(record: Any, columns: Mapping[str, str]) -> Any:
    """The record with the fields that its columns stand for; its other columns stay.

    Args:
        columns: field -> column; ``a.b`` is the entry ``b`` of the column ``a``

    Raises: Broken.
    """
    if not isinstance(record, dict):
        return record
    own: dict[str, Any] = record
    renamed = {name: value for name, value in own.items() if name not in columns.values()}
    for field_name, column in columns.items():
        value: Any = own
        for part in column.split(".") if column not in own else [column]:
            if not isinstance(value, dict) or part not in value:
                has = ", ".join(map(str, own))[:200]
                raise Broken(f"no column {column} among {has}", "the one that data.columns names")
            value = value[part]
        renamed[field_name] = value
    return renamed


@dataclass
class Mistakes:
    """Records that cannot be used, grouped by what is wrong with them.

    Args:
        broken: number of all of them
        places: message -> (number of the record, its place) of the first that have it, at most
            `LISTED_PLACES`; at most `SHOWN_PROBLEMS` messages of a rank
        counts: message -> number of all records that have it
    """

    broken: int = 0
    places: dict[str, list[tuple[int, str]]] = field(
        default_factory=dict[str, list[tuple[int, str]]]
    )
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, number: int, where: str, message: str) -> None:
        """Count a record."""
        self.broken += 1
        if message not in self.counts and len(self.counts) == SHOWN_PROBLEMS:
            return
        self.counts[message] = self.counts.get(message, 0) + 1
        places = self.places.setdefault(message, [])
        if len(places) < LISTED_PLACES:
            places.append((number, where))

    def merge(self, other: Mistakes) -> None:
        """Add those that another rank found."""
        self.broken += other.broken
        for message, count in other.counts.items():
            self.counts[message] = self.counts.get(message, 0) + count
            places = [*self.places.get(message, []), *other.places[message]]
            self.places[message] = sorted(places)[:LISTED_PLACES]

    def lines(self, total: str) -> list[str]:
        """A line a record, or a line for all records that share a mistake, in the file's order; at
        most `SHOWN_PROBLEMS`, and then the number of the others.

        Args:
            total: the records that were looked at, such as "200 records"
        """
        found: list[tuple[int, int, str]] = []  # number of the first record, of records; the line
        for message, places in self.places.items():
            count = self.counts[message]
            number, where = places[0]
            if count > LISTED_PLACES:
                line = f"{count} of {total}: {message}; first at {where}"
                found.append((number, count, line))
                continue
            found += [(number, 1, f"{where}: {message}") for number, where in places]
        shown = sorted(found)[:SHOWN_PROBLEMS]
        lines = [line for _, _, line in shown]
        if others := self.broken - sum(count for _, count, _ in shown):
            lines.append(f"and {others} more")
        return lines


def first_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(number, text) of the first lines of a .jsonl file that hold a record.

    Raises: OSError.
    """
    with open(path, "rb") as file:
        records = 0
        for number in range(1, 10 * LOOKED_AT):  # blank lines may be between them
            line = file.readline(_LONGEST)
            if not line or len(line) == _LONGEST or records == LOOKED_AT:
                return
            if line.strip():
                records += 1
                yield number, line.removesuffix(b"\n")


def first_rows(path: str) -> Iterator[dict[str, Any]]:
    """The first rows of a .parquet file, of its first row group, without their nulls.

    Raises: Broken; pyarrow cannot read the file.
    """
    import pyarrow  # takes longer than all of a plan without such files
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, buffer_size=_LONGEST) as file:
            groups = [0] if file.num_row_groups else []
            for batch in file.iter_batches(LOOKED_AT, row_groups=groups):
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}
                return
    except (pyarrow.ArrowException, OSError) as error:
        raise Broken(" ".join(str(error).split()), "a parquet file") from None


def first_records(path: str) -> Iterator[tuple[int, str, Any]]:
    """(number, place, record) of the first records of a .jsonl or .parquet file; of a line that
    is not JSON the `Broken` in place of the record.

    Raises: Broken, OSError; the file cannot be read.
    """
    shown = relative(path)
    if path.endswith(".parquet"):
        for number, row in enumerate(first_rows(path)):
            yield number, f"{shown}: row {number}", row
        return
    for line, text in first_lines(path):
        try:
            record = parse(text)
        except Broken as broken:
            record = broken
        yield line, f"{shown}:{line}", record


def has_chat_template(folder: Path) -> bool:
    """True if a tokenizer's folder holds a chat template, where transformers looks for it."""
    for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates"):
        if (folder / name).exists():
            return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
