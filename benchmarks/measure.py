"""How a case is timed: repeated calls, next to copies of as many bytes and other ways to do it.

Every number is that of the fastest call, which other processes disturb least. What is compared
takes turns, so that a slow minute touches all of it.
"""

import ctypes
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20  # above every L2
CYCLES = 2e9  # of a GPU, at most [1/s]
LONGEST_WAIT = 0.02  # of a GPU for the launches of one call [s]
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}

clock = CLOCKS["wall"]


class Effort(NamedTuple):
    """How long a case is timed: ``seconds`` in all, in ``rounds``, ``least`` calls in each."""

    seconds: float
    rounds: int
    least: int


FULL = Effort(1.0, 3, 5)
QUICK = Effort(0.05, 1, 1)
effort = FULL


def same(ours: Any, theirs: Any) -> bool:
    """Equal bits of integers and bools, floats within a few rounding steps of their dtype."""
    if isinstance(ours, Tensor):
        if not ours.is_floating_point():
            return torch.equal(ours, theirs)
        step = torch.finfo(ours.dtype).eps
        return torch.allclose(ours, theirs, rtol=8 * step, atol=8 * step, equal_nan=True)
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def near(ours: Sequence[Tensor], theirs: Sequence[Tensor], bound: float) -> bool:
    """True if each of both is equal up to ``bound`` times its largest."""
    pairs = zip(ours, theirs, strict=True)
    return all((a - b).abs().max() <= bound * b.abs().max() for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a table.

    Args:
        name:      what is measured, with its size.
        run:       the operation as its users call it.
        baselines: other ways to the same result, by name.
        moved:     bytes that the operation must at least read and write.
        written:   bytes of its result.
        at_most:   bars, upper bounds of columns: ``ms`` (the fastest call), ``x written``, ``MB
            beyond the result`` (of the extra ones).
        at_least:  bars, lower bounds: how many times as fast as the baseline of that name, or,
            for ``2 threads``, as itself on one thread; or ``% of floor``.
        agree:     whether a baseline's result (second) is ours (first); with ``error``, whether it
            computes the same thing, however exactly.
        error:     the error of a result, ours or a baseline's, against float64. Ours is held to it,
            baselines are reported: which one is inexact depends on the processor.
        error_at_most: largest ``error`` of ours.
        flops:     floating-point operations that the operation must do, where these are its floor.
        product:   a matrix product and its floating-point operations: that floor's rate.
    """

    name: str
    run: Callable[[], Any]
    baselines: Mapping[str, Callable[[], Any]]
    moved: int
    written: int
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)
    agree: Callable[[Any, Any], bool] = same
    error: Callable[[Any], float] | None = None
    error_at_most: float = math.inf
    flops: float = 0
    product: tuple[Callable[[], Any], float] | None = None


def call_seconds(run: Callable[[], Any], device: str, budget: float, least: int) -> list[float]:
    """Times of single calls [s]: ``least`` at least, then as many as ``budget`` [s] allows.

    One call before them warms up, unless one is enough: it takes so long. On cuda one always does,
    the times are the device's, between events. Before each, what an earlier call left in its L2 is
    flushed, and the device waits until the launches of the call are queued.
    """
    on_gpu = device == "cuda"
    if least > 1 or on_gpu:
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if on_gpu else None
    cycles = int(CYCLES * min(2 * host_seconds(run, 2), LONGEST_WAIT)) if on_gpu else 0
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (time.perf_counter() < end and len(times) < 1000):
        times.append(_seconds(run) if flush is None else _device_seconds(run, flush, cycles))
    return times


def _seconds(run: Callable[[], Any]) -> float:
    start = clock()
    run()
    return clock() - start


def _device_seconds(run: Callable[[], Any], flush: Tensor, cycles: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(cycles)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def host_seconds(run: Callable[[], Any], calls: int = 20) -> float:
    """Fastest time until the call returns [s], whatever the device still has to do."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        times.append(_seconds(run))
    return min(times)


def extra_bytes(run: Callable[[], Any], device: str) -> int:
    """Peak memory of one call beyond what was there, its result included [bytes].

    On cuda the allocator's peak; on the CPU the process's resident memory (Linux), numpy's and
    our kernels' included.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # else what malloc keeps is used again and not seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _resident("VmRSS")
    run()
    return max(_resident("VmHWM") - before, 0)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def copy_of(num_bytes: int, device: str) -> Callable[[], Any]:
    """A copy of ``num_bytes`` between tensors that are there already."""
    source, target = torch.zeros(2, max(num_bytes, 1), dtype=torch.uint8, device=device)
    return lambda: target.copy_(source)


def check(case: Case) -> dict[str, float]:
    """Errors of ``ours`` and of each baseline, if the case has any.

    Raises:
        ValueError: our error is too large, or a baseline's result is not the operation's.
    """
    ours = case.run()
    errors = {}
    if case.error:
        errors["ours"] = case.error(ours)
        if not errors["ours"] <= case.error_at_most:  # NaN too
            raise ValueError(
                f"{case.name}: the largest error against float64 is {errors['ours']:.3g}, expected "
                f"at most {case.error_at_most:g}"
            )
    for name, baseline in case.baselines.items():
        theirs = baseline()
        if not case.agree(ours, theirs):
            raise ValueError(f"{case.name}: the result differs from {name}'s, expected the same")
        if case.error:
            errors[name] = case.error(theirs)
    return errors


def measure(case: Case, device: str) -> dict[str, Any]:
    """Time a case, its baselines and its floor."""
    errors = check(case)
    extra = extra_bytes(case.run, device)
    row = {"case": case.name, **_rates(case, device), "extra MB": extra / 1e6}
    if errors:
        row["max error"] = errors["ours"]
    fastest = row["ms"] / 1e3
    if device == "cuda":
        row["host ms"] = host_seconds(case.run) * 1e3
    elif "2 threads" in case.at_least and (os.cpu_count() or 1) > 1:
        row["2 threads"] = _two_threads(case.run)
    least = 1 if case.product else min(effort.least, 2)  # products are slow
    half = effort.seconds / 2
    baselines = {n: min(call_seconds(b, device, half, least)) for n, b in case.baselines.items()}
    row["baselines"] = {
        n: {"ms": seconds * 1e3, "times": seconds / fastest} for n, seconds in baselines.items()
    }
    for name, of in row["baselines"].items():
        of |= {"error": errors[name]} if errors else {}
    return {**row, "bars": _bars(case, row)}


def _rates(case: Case, device: str) -> dict[str, Any]:
    """Times of a case against a copy of the bytes it must move and one of those it writes, or
    against products that do as many operations."""
    if case.product is not None:
        product, flops = case.product
        both = _timed_in_turns([case.run, product], device, 1)
        fastest, floor = map(min, both)
        rate = flops / floor
        rates = {
            "TFLOP/s": case.flops / fastest / 1e12,
            "matmul TFLOP/s": rate / 1e12,
            "% of floor": 100 * case.flops / fastest / rate,
        }
    else:
        runs = [case.run, copy_of(case.moved // 2, device), copy_of(case.written, device)]
        both = _timed_in_turns(runs, device)
        fastest, floor, written = map(min, both)
        rates = {
            "GB/s": case.moved / fastest / 1e9,
            "% of floor": 100 * floor / fastest,
            "x written": fastest / written,
        }
    return {"ms": fastest * 1e3, **rates}


def _timed_in_turns(
    runs: Sequence[Callable[[], Any]], device: str, least: int | None = None
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(effort.rounds):
        for run, own in zip(runs, times, strict=True):
            budget = effort.seconds / effort.rounds
            own += call_seconds(run, device, budget, least or effort.least)
    return times


def in_turns(
    runs: Iterable[Callable[[], Any]],
    rounds: int,
    warm: int = 1,
    before: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of one call of each in every round, after ``warm`` rounds that are not counted.

    Args:
        before: called before each call, and not timed.
    """
    every = [(run, list[float]()) for run in runs]
    for _ in range(warm + rounds):
        for run, own in every:
            before()
            start = clock()
            run()
            own.append(clock() - start)
    return [own[warm:] for _, own in every]


def _two_threads(run: Callable[[], Any]) -> float:
    before = torch.get_num_threads()
    fastest = {}
    try:
        for threads in (1, 2) * (2 * effort.rounds):  # many: both cores must be free at once
            torch.set_num_threads(threads)
            budget = effort.seconds / effort.rounds / 2
            own = min(call_seconds(run, "cpu", budget, effort.least))
            fastest[threads] = min(own, fastest.get(threads, own))
    finally:
        torch.set_num_threads(before)
    return fastest[1] / fastest[2]


def _bars(case: Case, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each bar with the value found; a machine without a second core has none for two threads."""
    found = {"ms": row["ms"], "% of floor": row["% of floor"]}
    found["MB beyond the result"] = row["extra MB"] - case.written / 1e6
    if "x written" in row:
        found["x written"] = row["x written"]
    found |= {name: of["times"] for name, of in row["baselines"].items()}
    if "2 threads" in row:
        found["2 threads"] = row["2 threads"]
    sides = [("at most", case.at_most), ("at least", case.at_least)]
    return [
        {
            "bar": f"{name} {side} {limit:g}",
            "found": found[name],
            "pass": found[name] <= limit if side == "at most" else found[name] >= limit,
        }
        for side, bars in sides
        for name, limit in bars.items()
        if name in found
    ]
