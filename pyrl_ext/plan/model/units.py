"""Bytes of a dtype, and numbers as text: bytes, seconds, counts."""

from __future__ import annotations

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
KIB = 2**10
MIB = 2**20
GIB = 2**30


def size(number: int) -> str:
    """Bytes with a binary unit: 1.5 GiB."""
    value = float(number)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value = value / 1024
        units = units[1:]
    return f"{value:.4g} {units[0]}"


def unit_for(most: float) -> tuple[str, int]:
    """(unit, its bytes) for a column of numbers whose largest is `most` bytes."""
    units = {"GiB": GIB, "MiB": MIB, "KiB": KIB}
    return next((item for item in units.items() if most >= 2 * item[1]), ("KiB", KIB))


def in_units(number: int, factor: int) -> str:
    """Bytes as a number of units: empty for 0, and `< 0.01` where rounding would show 0."""
    value = number / factor
    return "< 0.01" if 0 < value < 0.005 else f"{value:.2f}" if number else ""


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best: 12.3 ms, 10 min."""
    for unit, factor in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def amount(number: float, unit: str) -> str:
    """A number with its unit; FLOP and bytes get a decimal prefix: 3 TFLOP, 20 GB."""
    short = {"FLOP": "FLOP", "byte": "B"}.get(unit)
    if short is None:
        return f"{number:.4g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.4g} {prefix}{short}"
    return f"{number:.3g} {short}"


def count(number: int) -> str:
    """A number with K, M or B for thousands, millions and billions."""
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return str(number)


def scientific(number: float) -> str:
    """A small number as configs write it: 1e-6, 0.003."""
    return f"{number:g}".replace("e-0", "e-")


# device -> bytes of a chunk of the LM head's logits, as `loss.fused_head` has them
CHUNK_BYTES = {"cuda": 2**32, "cpu": 2**30}
