"""Rates that ``make gpu`` measured, in place of those that the forecast assumes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyrl_ext.plan.forecast.hardware import GPUS, Gpu
from pyrl_ext.plan.language.errors import ConfigError, Problem

FORMAT = "pyrl gpu report 1"  # as `benchmarks.gpu.report` writes it
DTYPE = "bfloat16"  # of the products that are measured
HINT = "Make one on such a GPU: make gpu GPU='--only rates'"


@dataclass(frozen=True)
class Rate:
    """The rate that one kind of kernel reached.

    Args:
        rate: amount per second.
        peak: the data sheet's [the same]; other dtypes and links have another, and keep their
            assumed share.
        what: sizes it was measured at.
    """

    rate: float
    peak: float
    what: str


@dataclass(frozen=True)
class Measured:
    """The rates of a report, by kind of `parts.REACHED`."""

    source: str
    device: str
    rates: Mapping[str, Rate] = field(default_factory=dict[str, Rate])


_in_use: ContextVar[Measured | None] = ContextVar("measured rates", default=None)


def in_use() -> Measured | None:
    """The rates that estimates take now; None: all are assumed."""
    return _in_use.get()


@contextmanager
def using(measured: Measured | None) -> Iterator[None]:
    """Let estimates inside the ``with`` block take ``measured``; None: assume all."""
    token = _in_use.set(measured)
    try:
        yield
    finally:
        _in_use.reset(token)


def peaks(gpu: Gpu) -> dict[str, tuple[str, float]]:
    """Kind -> (unit, the data sheet's rate): the kinds that a report may hold."""
    products = ("FLOP", gpu.flops[DTYPE])
    kinds = ("projections", "grouped experts", "attention", "head")
    return {
        **dict.fromkeys(kinds, products),
        "memory": ("byte", gpu.bandwidth),
        "host": ("byte", gpu.host),
    }


def read_report(path: str, gpu: str | None) -> Measured:
    """The rates in a report of ``make gpu``.

    Args:
        path: its report.json, or the folder
        gpu: the plan's; a report of another is refused

    Raises:
        ConfigError: the report cannot be read, is of another GPU, or holds a rate that cannot be
    """
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    if gpu is None:
        raise _refuse(file, "hardware.gpu is null, expected the GPU that was measured")
    whole = _parsed(file)
    device = str(whole["facts"].get("gpu", "none"))
    if not is_kind(device, gpu):
        raise _refuse(file, f"measured on {device}, expected {gpu} as hardware.gpu. {HINT}")
    rates: dict[str, Rate] = {}
    for row in _rows(whole):
        if (of := peaks(GPUS[gpu]).get(row["name"])) and row["state"] == "ok":
            found = _rate(file, row, *of)
            slower = rates.get(row["name"])  # both directions to the host
            if slower is None or found.rate < slower.rate:
                rates[row["name"]] = found
    if not rates:
        raise _refuse(file, f"no measured rate, expected those of the part rates. {HINT}")
    return Measured(str(file), device, rates)


def is_kind(device: str, gpu: str) -> bool:
    """True if a device calls itself one of ``gpu``'s: ``NVIDIA H100 80GB HBM3`` is an H100. Data
    sheets are those of SXM parts."""
    return re.search(rf"\b{gpu}\b(?!.*\b(PCIe|NVL)\b)", device, re.IGNORECASE) is not None


def _refuse(file: Path, message: str) -> ConfigError:
    return ConfigError([Problem(f"command line: --calibrate {file}", 0, message)])


def _parsed(file: Path) -> Any:
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refuse(file, f"{error.strerror}, expected a report of make gpu") from None
    except (ValueError, RecursionError) as error:
        raise _refuse(file, f"{error}, expected the JSON report of make gpu") from None
    kind = whole.get("format") if isinstance(whole, dict) else None
    if kind != FORMAT or not isinstance(whole.get("facts"), dict):
        raise _refuse(file, f"format {kind!r}, expected {FORMAT!r}. {HINT}")
    return whole


def _rows(whole: Any) -> Iterator[dict[str, Any]]:
    """Rows of the part `rates`."""
    for result in whole.get("results", ()):
        if result.get("part") == "rates":
            yield from result.get("rows", ())


def _rate(file: Path, row: dict[str, Any], unit: str, peak: float) -> Rate:
    numbers = row["numbers"]
    name = row["name"]
    rate = numbers.get("rate")
    if unit != numbers.get("unit") or numbers.get("dtype") != DTYPE:
        found = f"{numbers.get('unit')}, {numbers.get('dtype')}"
        raise _refuse(file, f"rate of {name} is in {found}, expected {unit}, {DTYPE}")
    if not isinstance(rate, int | float) or not math.isfinite(rate) or not 0 < rate <= peak:
        raise _refuse(
            file,
            f"rate of {name} is {rate} {unit}/s, expected above 0 and at most the data sheet's "
            f"{peak:g}; it was not measured well",
        )
    return Rate(float(rate), peak, str(numbers.get("what", "")))
