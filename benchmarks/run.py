"""Microbenchmarks: ``python -m benchmarks.run FAMILY... [--device cpu|cuda] [--threads N]``.

The family's tests run first, and each case is compared with its baselines: what is wrong is not
timed, and ends the command with exit status 1. The floor is a copy of as many bytes as the
operation must move, in the same run. Bars say how fast an idle machine should be. A bar that is
missed is printed with ``!`` and counted in the last line; the exit status stays 0, since a busy or
another machine may miss it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import measure as timing
from benchmarks.cases import FAMILIES, FRESH_MEMORY, cases_of, with_gpu_bars
from benchmarks.measure import measure
from benchmarks.tables import markdown, show
from pyrl_ext.megatron.cpu import keep_memory
from pyrl_ext.ops._native import C

NOTE = (
    "median: of all calls; GB/s, % of floor, x written and ratios: of the fastest calls. floor: a "
    "copy that moves as many bytes as the operation must, or, with TFLOP/s, torch's product of one "
    "chunk, as often as the operations need; x written: times a copy of the result. "
    "extra: peak memory of a call, result included. A baseline: ms of its fastest call, how "
    "many times as fast ours is, and +- its max error. max error: of log-probs and entropies "
    "(nats) against float64, 64 rows."
)

# where a family's tests are, if not in tests/ops/test_<family>.py
TESTS = {
    "experts": "tests/megatron/test_grouped_experts.py",
    "feed": "tests/trainer/test_prefetch.py",
    "gated_delta_rule": "tests/ops/test_sequences.py",
    "layout": "tests/pack/test_layout.py",
    "linear_logprob": "tests/loss/test_fused_head.py",
}


# tables that no family of cases prints, by their first argument
TABLES = {"dynamic_cp": "benchmarks.dynamic_cp:main", "layer": "benchmarks.layer:main"}


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TABLES:
        sys.exit(resolve_name(TABLES[sys.argv[1]])(sys.argv[2:]))
    args = _arguments()
    if len(args.families) > 1:
        run_each(args.families)
        return
    (family,) = args.families
    title = family
    if args.quick:
        timing.effort = timing.QUICK
        title += ", QUICK: timed too briefly to be quoted"
    elif args.tests:
        _run_tests(family)
    else:
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
    print(count_bars(rows))
    report = dict(family=family, torch=torch.__version__, device=how, load=load, rows=rows)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        from benchmarks.plot import plot

        plot(report, args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("families", choices=FAMILIES, nargs="+", metavar="FAMILY")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's default otherwise")
    parser.add_argument(
        "--malloc",
        choices=["default", "keep"],
        help="keep: what is freed (CPU); the default but for log-probs is to keep it",
    )
    parser.add_argument(
        "--clock",
        choices=sorted(timing.CLOCKS),
        default="wall",
        help="processor: of this process, with one thread what an idle machine would take",
    )
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="time at once")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="every second case, once or twice, untested: whether it is right",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw the rows into this PNG")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU, expected one")
    if len(args.families) > 1 and (args.json or args.plot):
        parser.error(f"--json, --plot: {len(args.families)} families, expected one")
    return args


def run_each(families: Sequence[str]) -> None:
    """Run every family in its own process, for what malloc keeps; exit with 1 if any failed."""
    options = [option for option in sys.argv[1:] if option not in families]
    rows = []
    failed = []
    with TemporaryDirectory() as folder:
        for family in families:
            file = Path(folder, family)
            command = [
                sys.executable,
                "-m",
                "benchmarks.run",
                family,
                *options,
                "--json",
                f"{file}",
            ]
            if subprocess.run(command).returncode:
                failed.append(family)
            else:
                rows += json.loads(file.read_text())["rows"]
    print(f"all {len(families)} families: {count_bars(rows)}")
    if failed:
        sys.exit(f"benchmarks: failed, see above: {', '.join(failed)}")


def _run_tests(family: str) -> None:
    """Exits where the family's tests fail: a wrong kernel is not timed."""
    tests_file = TESTS.get(family, f"tests/ops/test_{family}.py")
    command = [sys.executable, "-m", "pytest", "-q", tests_file]
    tests = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = (tests.stdout + tests.stderr).strip().splitlines()
    print(f"{tests_file}: {lines[-1] if lines else 'no output'}")
    if tests.returncode:
        print(f"{family}: its tests fail, so it is not timed. See: pytest {tests_file}")
        sys.exit(1)


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    isas = {torch.backends.cpu.get_cpu_capability(), C.auto_isa().upper() if C else "no kernels"}
    return f"cpu, {threads} thread{'s' * (threads > 1)}, {' and '.join(sorted(isas))}"


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: the numbers of all rows, then a column for each baseline of any."""
    numbers = list(dict.fromkeys(n for row in rows for n in row if n not in ("baselines", "bars")))
    numbers.remove("fastest ms")  # what the ratios compare; in the JSON
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))

    def cell(row: dict[str, Any], name: str) -> str:
        value = row.get(name, "")
        return value if isinstance(value, str) else f"{value:.3g}"

    def against(row: dict[str, Any], name: str) -> str:
        of = row["baselines"].get(name)
        if not of:
            return ""
        error = f" +-{of['error']:.0e}" if "error" in of else ""
        return f"{_plain(of['ms'])} {_plain(of['times'])}x{error}"

    cells = [[cell(r, n) for n in numbers] + [against(r, n) for n in names] for r in rows]
    return numbers + names, cells


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bars(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a bar: what the cases that have it reached, in their order; ``!`` where one fails."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for bar in row["bars"]:
            found.setdefault(bar["bar"], []).append(bar)
    return [
        f"{'PASS' if all(b['pass'] for b in own) else 'FAIL'}  {text}:  "
        + "  ".join(f"{b['found']:.3g}{'' if b['pass'] else '!'}" for b in own)
        for text, own in found.items()
    ]


def count_bars(rows: Sequence[dict[str, Any]]) -> str:
    """Number of bars the cases have, and how many of them are missed."""
    passed = [bar["pass"] for row in rows for bar in row["bars"]]
    return f"{len(passed)} bars, {passed.count(False)} missed"


if __name__ == "__main__":
    main()
