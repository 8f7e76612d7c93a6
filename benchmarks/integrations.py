"""Parts of this package next to the code that they can replace in verl 0.9.1 and SkyRL 0.3.0.

    PYTHONPATH=.venv/verl:.venv/skyrl python -m benchmarks.integrations [--quick]

One table of four works: log-probs over a sharded vocabulary, packing, routing replay, and the
balance of microbatches. Every code gets the same values, in the form that its trainer holds.
Results are checked before they are timed: a wrong one ends the command with an error. A missed
speed bar is printed and counted. A trainer that is not on the import path has a row that says so.

Two gloo ranks share the vocabulary; all else is the work of one rank. Every rank has one thread.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.measure import extra_bytes, in_turns
from benchmarks.tables import SLOWER, bars, count, show

if TYPE_CHECKING:
    from benchmarks.cases_integrations import Work

RANKS = 2
CALLS = 7
SHRINK = 8
COLUMNS = ("work", "code", "result", "ms", "", "MB", "")
NOTE = (
    "ms: of rank 0's processor, the median call, and times ours (*: ours is slower). MB: peak "
    "memory of a call, result included, and times ours. Results. log-probs: largest errors of "
    "log-probs and entropies (nats) and of gradients, against float64. replay: rows of padding in "
    "which an expert repeats. balance: cost of the slowest rank of each microbatch, summed, over "
    "an even share of all cost; microbatches over the least that the token limit allows. Ours "
    "plans all ranks at once; of the others the time is that of the driver and one rank."
)


def rows_of(group: dist.ProcessGroup, quick: bool) -> list[dict[str, Any]]:
    """Measure the log-probs on both ranks, and everything else on the first rank."""
    from megatron.core import parallel_state

    from benchmarks import cases_integrations as cases
    from benchmarks.dynamic_cp import DISTRIBUTIONS

    calls = 1 if quick else CALLS
    shrink = SHRINK if quick else 1
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    dtypes = torch.float32, torch.bfloat16
    rows = [measured(cases.logprobs(group, dtype, shrink), calls) for dtype in dtypes]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    if group.rank() == 0:
        rows.append(measured(cases.packing(shrink), calls))
        # routers of GLM-4.7-Flash; of GLM-4.7, where all layers arrive and the rank has half
        for sizes in ((46, 46, 4, 64), (92, 46, 8, 160)):
            rows.append(measured(cases.replay(*sizes, shrink), calls))
        for drawn, samples, ranks in product(DISTRIBUTIONS, (512, 4096), (8, 64)):
            rows.append(measured(cases.balance(drawn, samples, ranks, shrink), calls))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return rows


def measured(work: Work, calls: int) -> dict[str, Any]:
    """Results, milliseconds and megabytes of every code, and the bar.

    Raises: ValueError if a result is wrong.
    """
    results = {code: work.judge(code, run()) for code, run in work.runs.items()}
    memory = {code: extra_bytes(run, "cpu") / 1e6 for code, run in work.runs.items()}
    times = in_turns(work.runs.values(), calls, clock=time.process_time)
    ms = {code: 1e3 * statistics.median(own) for code, own in zip(results, times, strict=True)}
    others = {code: own / ms["ours"] for code, own in ms.items() if not code.startswith("ours")}
    bar = f"{work.name.partition(',')[0]}: others take at least {work.faster} times as long"
    return {
        "name": work.name,
        "codes": {code: (results[code], ms[code], memory[code]) for code in results},
        "baselines": {code: {"times": ratio} for code, ratio in others.items()},
        "bars": [
            {"bar": bar, "found": ratio, "pass": ratio >= work.faster}
            for ratio in others.values()
            if work.faster is not None
        ],
    }


def lines(row: Mapping[str, Any], missing: Mapping[str, str]) -> Iterator[list[str]]:
    """A line for each code, one for each trainer that is missing, and a line across."""
    name = row["name"]
    _, *ours = row["codes"]["ours"]
    for code, (result, *numbers) in row["codes"].items():
        line = [name, code, result]
        for number, our in zip(numbers, ours, strict=True):
            line += [f"{number:.3g}", "" if code.startswith("ours") else _times(number, our)]
        yield line
        name = ""
    for trainer, message in missing.items():
        yield ["", trainer, message, "", "", "", ""]
    yield []


def _times(number: float, ours: float) -> str:
    return f" {number / ours:.3g}x{SLOWER * (number < ours)}" if number and ours else ""


def print_table(rows: Sequence[dict[str, Any]], quick: bool) -> None:
    from benchmarks.cases_integrations import missing, versions
    from benchmarks.timed_family import device_name

    names = [*versions(), f"torch {torch.__version__}", processor(), device_name("cpu")]
    title = f"integrations: {', '.join(names)}, load {os.getloadavg()[0]:.1f}, {date.today()}"
    title += ", QUICK: not to be quoted" * quick
    found = [line for row in rows for line in lines(row, missing())]
    show(COLUMNS, found, 140, words=3, title=title, caption=NOTE)
    print(*bars(rows), count(rows), sep="\n", flush=True)


def processor() -> str:
    """The processor's name, as Linux knows it."""
    entries = Path("/proc/cpuinfo").read_text().splitlines()
    names = [entry.partition(":")[2].strip() for entry in entries if entry.startswith("model name")]
    return names[0] if names else "unknown processor"


def run_rank(rank: int, folder: str, quick: bool) -> None:
    """Measure on one of two ranks; the first one prints the table."""
    logging.disable(logging.WARNING)  # imports of megatron-core and trainers warn, so before them
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    limit = timedelta(minutes=20)  # the second rank waits for all that the first one measures
    dist.init_process_group("gloo", f"file://{folder}/store", limit, RANKS, rank)
    assert dist.group.WORLD is not None
    rows = rows_of(dist.group.WORLD, quick)
    if rank == 0:
        print_table(rows, quick)
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m benchmarks.integrations", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"a {SHRINK}th of the sizes, once")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder, options.quick), nprocs=RANKS)


if __name__ == "__main__":
    main()
