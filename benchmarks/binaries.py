"""Registers, memory and spills of every GPU kernel as compiled: ``python -m benchmarks.binaries``.

Registers, spills and shared memory of each Triton variant that a launch of
`tests.helpers.launch_shapes` asks for and of each CUDA kernel inside the extension, for every
target. Needs no GPU: nothing runs.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import triton

from benchmarks.tables import show
from tests.helpers.launch_shapes import ROWS, launch_shapes
from tests.helpers.offline_triton import Variant, offline

TARGETS = (80, 90, 100)

USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Binary(NamedTuple):
    """One kernel for one target; ``spills`` is its stack and local memory a thread [bytes]."""

    kernel: str
    target: int
    registers: int
    spills: int
    shared: int


def triton_binaries(name: str, target: int) -> list[Binary]:
    """The kernels of a launch of `launch_shapes`, compiled now for every kind of row count."""
    launch = launch_shapes()[name]
    with tempfile.TemporaryDirectory() as folder, offline(Path(folder), target) as variants:
        for rows in ROWS:
            launch(rows)
        return [binary_of(variant, target) for variant in variants]


def binary_of(variant: Variant, target: int) -> Binary:
    (binary,) = read_usage(variant.cubin)
    # cuobjdump does not know the shared memory that a launch asks for
    return binary._replace(kernel=variant.kernel, target=target, shared=variant.shared)


def extension() -> Path | None:
    """The compiled extension, or None where it is not built."""
    spec = find_spec("pyrl_ext._C")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def read_usage(file: Path) -> list[Binary]:
    """The kernels inside a cubin or a library, for each target in it."""
    command = [cuobjdump(), "-res-usage", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return list(parse(text))


def parse(text: str) -> Iterator[Binary]:
    for part in text.split("\narch = sm_")[1:] or [f"0\n{text}"]:  # a cubin names no target
        target = int(re.match(r"\d+", part)[0])  # type: ignore[index]
        for name, registers, stack, shared, local in USAGE.findall(part):
            yield Binary(
                readable(name), target, int(registers), int(stack) + int(local), int(shared)
            )


@cache
def cuobjdump() -> str:
    """The one that Triton ships."""
    import triton.backends.nvidia as nvidia

    return str(Path(nvidia.__path__[0]) / "bin" / "cuobjdump")


def readable(mangled: str) -> str:
    """``gather_rows_kernel<uint4>`` of its mangled name; a name that is not mangled stays."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    address = demangle(mangled.encode(), None, None, None)
    if not address:
        return mangled
    name = ctypes.string_at(address).decode().removeprefix("void ")
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    name = re.sub(r"pyrl::|\(anonymous namespace\)::", "", name)
    return re.sub(r"\([^()]*\)$", "", name.replace("unsigned ", "u").replace("> >", ">>"))


def all_binaries() -> Iterator[Binary]:
    """Every kernel of the package for every target; Triton's are compiled now."""
    for name in launch_shapes():
        for target in TARGETS:
            for binary in triton_binaries(name, target):
                yield binary._replace(kernel=f"{name}: {binary.kernel}")
    if file := extension():
        yield from sorted(read_usage(file))


def main() -> None:
    file = extension()
    print(f"Triton {triton.__version__}; {file.name if file else 'the extension is not built'}")
    found = [*all_binaries()]
    rows = [[name, f"sm_{target}", *map(str, numbers)] for name, target, *numbers in found]
    show(("kernel", "target", "registers", "spills [B]", "shared [B]"), rows, width=120)
    spilled = [f"{each.kernel} on sm_{each.target}" for each in found if each.spills]
    if spilled:
        sys.exit(f"kernels that spill, expected none: {', '.join(spilled)}")


if __name__ == "__main__":
    main()
