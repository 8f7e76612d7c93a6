"""One family of cases, timed: its table, its bars, and what to write of them."""

import argparse
import json
import os
import sys
from datetime import date
from itertools import islice

import torch

from benchmarks import measure as timing
from benchmarks.cases import FRESH_MEMORY, cases_of, with_gpu_bars
from benchmarks.measure import measure
from benchmarks.tables import bars, count, markdown, show, table_of
from pyrl_ext.megatron.cpu import keep_memory
from pyrl_ext.ops._native import C

NOTE = (
    "All times, rates and ratios are those of the fastest call. floor: a copy that moves as many "
    "bytes as the operation must, or, with TFLOP/s, torch's product of one chunk, as often as the "
    "operations need; x written: times a copy of the result. extra: peak memory of a call, result "
    "included. A baseline: its ms, how many times as fast ours is (*: ours is slower), and +- its "
    "max error. max error: of log-probs and entropies (nats) against float64, 64 rows."
)


def run(family: str, args: argparse.Namespace) -> int:
    """Time a family as the arguments of `benchmarks.run` say, and print it; the exit code.

    Raises:
        ValueError: a result is wrong.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no GPU, expected one. See `pyrl doctor`", file=sys.stderr)
        return 2
    title = family
    if args.quick:
        timing.effort = timing.QUICK
        title += ", QUICK: timed too briefly to be quoted"
    elif not args.tests:
        title += ", NOT TESTED in this run"
    if args.threads:
        torch.set_num_threads(args.threads)

    kept = args.malloc or ("default" if family in FRESH_MEMORY else "keep")
    if kept == "keep":
        keep_memory()
    timing.clock = timing.CLOCKS[args.clock]
    cases = cases_of(family)(args.device)
    if args.quick:
        cases = islice(cases, 0, None, 2)
    if args.device == "cuda":
        cases = (with_gpu_bars(family, case) for case in cases)
    rows = [measure(case, args.device) for case in cases]
    where = device_name(args.device)
    load = os.getloadavg()[0]  # above the threads used, others took part of the processor
    how = where if args.device == "cuda" else f"{where}, malloc {kept}, {args.clock} time"
    title = f"{title}: torch {torch.__version__}, {how}, load {load:.1f}, {date.today()}"
    columns, cells = table_of(rows)
    if args.markdown:
        print(f"### {title}\n\n{markdown(columns, cells)}\n")
    else:
        show(columns, cells, 140, title=title, caption=NOTE, padding=(0, 0), pad_edge=False)
    for line in bars(rows):
        print(line)
    print(count(rows))
    report = dict(family=family, torch=torch.__version__, device=how, load=load, rows=rows)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        from benchmarks.plot import plot

        plot(report, args.plot)
    return 0


def device_name(device: str) -> str:
    """The GPU; or the threads and instruction sets of the CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    isas = {torch.backends.cpu.get_cpu_capability(), C.auto_isa().upper() if C else "no kernels"}
    return f"cpu, {threads} thread{'s' * (threads > 1)}, {' and '.join(sorted(isas))}"
