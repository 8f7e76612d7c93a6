"""Findings of a rehearsal: waits of the host by line, and wrong uses of host memory."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
_HERE = str(Path(__file__).parent)
_CPU = str(ROOT / "pyrl_ext/megatron/cpu.py")  # between megatron and torch


@dataclass
class Seen:
    """Attributes:

    waits: place and operator -> how often the host waited for the device there.
    reports: uses of host memory that lose data, or that wait although they are not to.
    unqueued: operators without a rule for shapes, which ran when they were submitted.
    """

    waits: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)
    unqueued: Counter[str] = field(default_factory=Counter)

    def wait(self, what: object) -> None:
        self.waits[f"{place()} {what}"] += 1

    def report(self, what: str) -> None:
        self.reports.append(f"{place()}: {what}")

    def clear(self) -> None:
        self.waits.clear()
        self.reports.clear()
        self.unqueued.clear()


SEEN = Seen()


def place() -> str:
    """``file:line function`` of the innermost caller in this repository, or of the innermost one
    that is not torch, such as megatron."""
    frame = sys._getframe(1)
    other = ""
    while frame is not None:
        name = frame.f_code.co_filename
        here = name.startswith(str(ROOT)) and "/.venv/" not in name
        if here and name != _CPU and not name.startswith(_HERE):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_qualname}"
        if not other and "/torch/" not in name and not name.startswith((_HERE, _CPU, "<")):
            other = f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "?"


def without_lines(waits: Counter[str]) -> dict[str, int]:
    """The waits by ``file function operator``, which a change elsewhere in the file leaves."""
    found = Counter[str]()
    for key, count in waits.items():
        found[re.sub(r":\d+ ", " ", key, count=1)] += count
    return dict(found)
