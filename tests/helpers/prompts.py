"""Prompt files, tokenizers and prompts that the tests of the data room start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyrl_ext.samples import Prompt


def write_lines(path: Path, *lines: Any) -> Path:
    """A .jsonl file of records; bytes are written as they are."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def numbered_prompts(count: int) -> list[Prompt]:
    """Prompts of one token each, 100, 101, ..."""
    return [Prompt(i, (100 + i,)) for i in range(count)]
