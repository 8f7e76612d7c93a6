"""How a case is timed: repeated calls, against a memcpy of as many bytes and plain torch.

The median says what to expect on this machine as it is; rates and ratios compare the fastest
calls, which other processes disturb least.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table.

    ``moved`` [bytes] is what the operation must at least read and write. ``baseline`` computes
    the same in plain torch.
    """

    name: str
    run: Callable[[], Any]
    baseline: Callable[[], Any]
    moved: int


def keep_memory() -> None:
    """Let malloc keep what is freed: else a large result is mapped anew in every call, and page
    faults, several times dearer than the operation, are what is timed."""
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def call_seconds(run: Callable[[], Any], device: str, budget: float = 1.0) -> list[float]:
    """Times of single calls [s]; a few calls at least, then as many as ``budget`` [s] allows."""
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 7 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[2:]  # the first two warm up


def measure(case: Case, device: str) -> dict[str, Any]:
    """Time a case, its baseline and a copy of as many bytes, read and written."""
    source = torch.zeros(max(case.moved // 2, 1), dtype=torch.uint8, device=device)
    times = call_seconds(case.run, device)
    fastest = min(times)
    copy = min(call_seconds(source.clone, device))
    baseline = min(call_seconds(case.baseline, device))
    return {
        "case": case.name,
        "median ms": statistics.median(times) * 1e3,
        "fastest ms": fastest * 1e3,
        "GB/s": case.moved / fastest / 1e9,
        "% of memcpy": 100 * copy / fastest,
        "torch ms": baseline * 1e3,
        "times torch": baseline / fastest,
    }
