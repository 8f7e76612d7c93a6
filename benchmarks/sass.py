"""Memory instructions of CUDA kernels: ``python -m benchmarks.sass [FILE ...]``.

A kernel that moves memory is limited by instructions if its loop has too many of them for the bytes
that it reads and writes. For each kernel of the extension (or of the cubins named), for sm_90:
registers, the warps that these leave an SM, global loads and stores with their bytes, barriers,
instructions for 16 bytes in the innermost loop that moves most, and the share of the rate of a copy
that the SM's four instructions a clock allow that loop on an H100 and an H200. Branches that a call
does not take are counted, too. Needs no GPU: nothing runs.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.binaries import cuobjdump, extension, read_usage, readable
from benchmarks.tables import show

TARGET = 90
COPY = {"H100": 13.4, "H200": 19.0}  # bytes a clock and SM, read and written
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


class Instruction(NamedTuple):
    address: int
    code: str
    operands: str

    @property
    def moved(self) -> int:
        """Bytes of global memory that a thread reads or writes."""
        if not self.code.startswith(("LDG", "STG")):
            return 0
        widths = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
        return next((widths[part] for part in self.code.split(".") if part in widths), 4)


def parse(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(kernel, instructions) of what ``cuobjdump -sass`` prints."""
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        yield (
            readable(name.strip()),
            [Instruction(int(at, 16), code, rest) for at, code, rest in LINE.findall(body)],
        )


def disassembled(file: Path) -> dict[str, list[Instruction]]:
    """The instructions of every kernel of a cubin or a library for `TARGET`, by name."""
    tool = Path(cuobjdump())
    path = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}  # it calls nvdisasm
    command = [str(tool), "-sass", "-arch", f"sm_{TARGET}", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    return dict(parse(run.stdout))


def loops(code: list[Instruction]) -> Iterator[list[Instruction]]:
    """The instructions of each innermost loop: from the target of a branch back to that branch."""
    spans = []
    for i in code:
        target = re.search(r"0x([0-9a-f]+)", i.operands) if i.code.startswith("BRA") else None
        if target and int(target[1], 16) < i.address:
            spans.append((int(target[1], 16), i.address))
    for first, last in spans:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans):
            yield [i for i in code if first <= i.address <= last]


def per_16_bytes(code: list[Instruction]) -> float | None:
    """Instructions for 16 bytes in the shortest of the loops that move most; None: in no loop."""
    found = [(sum(i.moved for i in loop), len(loop)) for loop in loops(code)]
    moving = [(moved, -size) for moved, size in found if moved]
    if not moving:
        return None
    moved, size = max(moving)
    return -16 * size / moved


def share(instructions: float, gpu: str) -> float:
    """Part of a copy's rate, at most 1: each clock four warps of 32 lanes issue an instruction."""
    return min(1.0, 4 * 32 * 16 / instructions / COPY[gpu])


def widths(code: list[Instruction], kind: str) -> str:
    """``4x16 1x8``: how many loads (``LDG``) or stores of how many bytes."""
    counts = Counter(i.moved for i in code if i.code.startswith(kind))
    return " ".join(f"{counts[size]}x{size}" for size in sorted(counts, reverse=True))


def rows(file: Path) -> Iterator[list[str]]:
    """A row of the table for every kernel of ``file``."""
    usage = {b.kernel: b for b in read_usage(file) if b.target in (0, TARGET)}
    for name, code in sorted(disassembled(file).items()):
        registers = usage[name].registers
        each = per_16_bytes(code)
        warps = min(64, 65536 // (32 * -(-registers // 8) * 8))
        barriers = sum(i.code.startswith("BAR") for i in code)
        limits = ["", ""] if each is None else [f"{100 * share(each, gpu):.0f} %" for gpu in COPY]
        yield [
            name,
            str(registers),
            str(warps),
            str(len(code)),
            widths(code, "LDG"),
            widths(code, "STG"),
            str(barriers),
            "" if each is None else f"{each:.0f}",
            *limits,
        ]


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]] or [f for f in [extension()] if f is not None]
    numbers = ("registers", "warps", "instructions", "loads", "stores", "barriers", "per 16 B")
    cells = [row for file in files for row in rows(file)]
    show(("kernel", *numbers, *COPY), cells, width=170, title=f"sm_{TARGET}")


if __name__ == "__main__":
    main()
