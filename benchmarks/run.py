"""Microbenchmarks: ``python -m benchmarks.run KERNEL [--device cpu|cuda] [--json FILE]``."""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES
from benchmarks.measure import keep_memory, measure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("kernel", choices=CASES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's default otherwise")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU, expected one")
    if args.threads:
        torch.set_num_threads(args.threads)

    keep_memory()
    rows = [measure(case, args.device) for case in CASES[args.kernel](args.device)]
    where = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    table = Table(title=f"{args.kernel}: torch {torch.__version__}, {where}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.4g}" for v in row.values()))
    Console(width=120).print(table)
    if args.json:
        report = dict(kernel=args.kernel, torch=torch.__version__, device=where, rows=rows)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
