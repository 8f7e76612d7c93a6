"""Reads lengths of samples: numbers in a text or JSON file, or a recorded batch, by its header."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyrl_ext.plan.language.errors import ConfigError, Problem, show

MOST = 1 << 20
"""Samples of a file."""
HEADER = 100 << 20
"""Bytes of a header, as safetensors limits it."""
EXPECTED = "expected a whole number of tokens, at least 1"


class Length(NamedTuple):
    """One sample: the rows that are computed, where the file says so, and its prompt."""

    rows: int
    where: str
    line: int
    prompt: Any
    """The same for samples of one prompt."""


def read_lengths(path: str, samples_per_prompt: int) -> list[Length]:
    """The lengths in a file.

    Args:
        path: numbers, one a line; a JSON list of numbers; a recorded batch, `*.safetensors`; or the
            folder of such: the last batch in it
        samples_per_prompt: of a file of numbers

    Raises:
        ConfigError: naming the file and the line of everything that is no length
    """
    file = Path(path)
    if file.is_dir():
        file = max(file.glob("step-*.safetensors"), default=file / "step-*.safetensors")
    found = _recorded(file) if file.suffix == ".safetensors" else _numbers(file)
    problems: list[Problem] = []
    lengths: list[Length] = []
    for i, (value, line, prompt) in enumerate(found):
        where = f"{file}:{line}" if line else f"{file}: sample {i}"
        if type(value) is not int or value < 1:
            problems.append(Problem(where, line or i, f"{show(value)}, {EXPECTED}"))
        elif not problems:
            by = i // max(1, samples_per_prompt) if prompt is None else prompt
            lengths.append(Length(value, where, line or i, by))
    if not problems and not 1 <= len(lengths) <= MOST:
        problems.append(Problem(f"{file}", 0, f"{len(lengths)} lengths, expected 1 to {MOST:,}"))
    if problems:
        raise ConfigError(problems)
    return lengths


Found = Iterator[tuple[Any, int, Any]]  # value, its line, its prompt


def _refuse(file: Path, message: str, line: int = 0) -> ConfigError:
    return ConfigError([Problem(f"{file}:{line}" if line else f"{file}", line, message)])


def _bytes(file: Path, most: int) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(most)
    except OSError as error:
        raise _refuse(file, f"{error.strerror}, expected a file of lengths") from None


def _numbers(file: Path) -> Found:
    """A JSON list if it begins like one; otherwise a number a line, blank lines left out."""
    try:
        text = _bytes(file, 32 * MOST).decode()
    except UnicodeDecodeError:
        raise _refuse(file, "not text, expected numbers or a *.safetensors file") from None
    if not text.lstrip().startswith("["):
        for line, words in enumerate(text.splitlines(), start=1):
            if words := words.strip():
                yield (int(words) if re.fullmatch(r"\d{1,18}", words) else words), line, None
        return
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0)
        raise _refuse(file, f"{error}, expected a JSON list of lengths", line) from None
    if any(isinstance(value, list | dict | str) for value in values):  # commas would be ambiguous
        bad = next(i for i, v in enumerate(values) if isinstance(v, list | dict | str))
        raise _refuse(file, f"item {bad} is {show(values[bad])}, {EXPECTED}", 1)
    lines = (text.count("\n", 0, at.start()) + 1 for at in re.finditer(r"[^\s,\[\]]+", text))
    for value, line in zip(values, lines, strict=True):
        yield value, line, None


def _recorded(file: Path) -> Found:
    """Sizes of the samples from the file's header: the last token of a sample is never an input."""
    raw = _bytes(file, 8)
    size = struct.unpack("<Q", raw)[0] if len(raw) == 8 else HEADER + 1
    try:
        header = json.loads(_bytes(file, 8 + min(size, HEADER))[8:])
        samples = json.loads(header["__metadata__"]["index"])["samples"]
        found = [(each["size"], each["prompt_id"]) for each in samples]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"unreadable header ({error!r}), expected a batch that rollout.record wrote"
        raise _refuse(file, message) from None
    for size, prompt in found:
        yield (size - 1 if type(size) is int else size), 0, prompt
