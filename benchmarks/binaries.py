"""Registers, memory and spills of every GPU kernel as compiled: ``python -m benchmarks.binaries``.

Registers, spills and shared memory of each Triton variant named in a ``BUILDS`` and of each CUDA
kernel inside the extension, for every target. Needs no GPU: nothing runs.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import pyrl_ext

PACKAGE = Path(pyrl_ext.__file__).parent
TARGETS = (80, 90, 100)

USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Binary(NamedTuple):
    """One kernel for one target; ``spills`` is its stack and local memory a thread [bytes]."""

    kernel: str
    target: int
    registers: int
    spills: int
    shared: int


def triton_builds() -> dict[str, tuple[Any, dict[str, str], dict[str, object]]]:
    """``op variant`` -> (kernel, signature, constexprs) of every op's ``triton_kernel.BUILDS``;
    among the last may be the launch's ``num_warps``."""
    builds = {}
    for file in sorted(PACKAGE.glob("ops/*/triton_kernel.py")):
        op = file.parent.name
        module = import_module(f"pyrl_ext.ops.{op}.{file.stem}")
        for name, build in getattr(module, "BUILDS", {}).items():
            builds[f"{op} {name.removeprefix(op).strip()}"] = build
    return builds


def build_triton(name: str, target: int) -> Binary:
    """Compile one variant ahead of time."""
    return compiled(name, triton_builds()[name], target)


def compiled(
    name: str,
    build: tuple[Any, dict[str, str], dict[str, object]],
    target: int,
    aligned: Collection[str] = (),
    **options: Any,
) -> Binary:
    """``aligned``: arguments that 16 divides; ``options``: those of the launch (``num_warps``)."""
    kernel, signature, constants = build
    constexprs = {name: value for name, value in constants.items() if name in signature}
    options |= {name: value for name, value in constants.items() if name not in signature}
    known = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=known)
    built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        (read,) = read_usage(Path(file.name))
    # what a launch asks for besides is known to Triton alone
    return read._replace(kernel=name, target=target, shared=built.metadata.shared)


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
    for name in triton_builds():
        yield from (build_triton(name, target) for target in TARGETS)
    if file := extension():
        yield from sorted(read_usage(file))


def main() -> None:
    file = extension()
    print(f"Triton {triton.__version__}; {file.name if file else 'the extension is not built'}")
    table = Table()
    for column in ("kernel", "target", "registers", "spills [B]", "shared [B]"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    spilled = []
    for binary in all_binaries():
        name, target, *numbers = binary
        table.add_row(name, f"sm_{target}", *map(str, numbers))
        if binary.spills:
            spilled.append(f"{name} on sm_{target}")
    Console(width=120).print(table)
    if spilled:
        sys.exit(f"kernels that spill, expected none: {', '.join(spilled)}")


if __name__ == "__main__":
    main()
