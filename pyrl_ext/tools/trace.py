"""``pyrl trace RUN [--step N]``: merge the traces of a step's ranks on one clock.

``log.profile: [3, 5]`` lets a run write them. The merged file opens in https://ui.perfetto.dev or
chrome://tracing, a process for each rank. The table says which rank each phase took longest on: a
phase that is long on one rank alone is what the others wait for.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pyrl_ext.parallel.atomic_write import replacing
from pyrl_ext.plan.command import called

NAME = re.compile(r"step-(\d+)-rank-(\d+)\.json\.gz")  # as `run.profile` names them
PHASE = "pyrl: "  # what the names of this package's spans begin with
Seconds = dict[str, dict[int, float]]  # phase -> rank -> seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1: there is nothing to merge, or a rank's file is missing or damaged."""
    parser = argparse.ArgumentParser(prog=called("pyrl_ext.tools.trace"), description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--step", type=int, help="only this step; all that were traced without it")
    options = parser.parse_args(arguments)
    try:
        for step, files in steps_in(options.run, options.step).items():
            merged = options.run / "trace" / f"step-{step:06d}.json.gz"
            show(step, merge(files, merged))
            print(f"wrote {merged}", flush=True)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def steps_in(run: Path, step: int | None) -> dict[int, dict[int, Path]]:
    """Step -> rank -> its file.

    Raises: FileNotFoundError where there is none.
    """
    found: dict[int, dict[int, Path]] = defaultdict(dict)
    for file in sorted((run / "trace").glob("step-*")):
        if (name := NAME.fullmatch(file.name)) and step in (None, int(name[1])):
            found[int(name[1])][int(name[2])] = file
    if not found:
        which = "a step" if step is None else f"step {step}"
        raise FileNotFoundError(
            f"{run / 'trace'}: no trace of {which}, expected those of every rank. Train with "
            f"log.profile=[{3 if step is None else step}]"
        )
    return dict(found)


def merge(files: Mapping[int, Path], into: Path) -> Seconds:
    """Write the events of all ranks to one file; returns the seconds of each phase on each rank.

    Times count from when a rank left the barrier before the step, so hosts need not agree on the
    time of day.

    Raises: ValueError for a file that is no trace of this package, and for missing ranks or more.
    """
    seconds = Seconds()
    with replacing(into) as partial, gzip.open(partial, "wt", compresslevel=3) as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        shown = track(files.items(), into.name, console=Console(stderr=True), transient=True)
        for place, (rank, file) in enumerate(shown):
            trace = read(file)
            try:
                _check_ranks(trace["pyrl"]["ranks"], files)
                for name, took in write_events(trace, out, first=place == 0):
                    of_rank = seconds.setdefault(name, {})
                    of_rank[rank] = of_rank.get(rank, 0.0) + took
            except (AttributeError, LookupError, TypeError) as error:
                raise _no_trace(file, error) from error
        out.write("]}")
    return seconds


def _check_ranks(ranks: int, files: Mapping[int, Path]) -> None:
    """Raises: ValueError unless the files are those of so many ranks."""
    folder = next(iter(files.values())).parent
    if missing := sorted({*range(ranks)} - files.keys()):
        raise ValueError(f"{folder}: lacks ranks {missing}, expected all files")
    if len(files) > ranks:
        raise ValueError(
            f"{folder}: has files of ranks {sorted(files)} for a step, expected those of {ranks} "
            "ranks; some are of another layout. Remove them"
        )


def read(file: Path) -> Mapping[str, Any]:
    """A rank's file. Raises: ValueError where it is damaged."""
    try:
        with gzip.open(file, "rt", encoding="utf-8", errors="replace") as text:
            return json.load(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise _no_trace(file, error) from error


def _no_trace(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{file}: {error!r}, expected a trace of this package. Remove the file and trace again"
    )


def write_events(
    trace: Mapping[str, Any], out: IO[str], first: bool
) -> Iterator[tuple[str, float]]:
    """Write the events of a rank as a process; yields (phase, seconds) of each of our spans."""
    rank = trace["pyrl"]["rank"]
    # both count from the epoch: a rank's clock is right about itself
    shift = (trace.get("baseTimeNanoseconds", 0) - trace["pyrl"]["barrier"]) / 1e3
    places = dict[Any, int]()
    for event in trace["traceEvents"]:
        own = event.get("pid")
        event["pid"] = places.setdefault(own, 1000 * rank + len(places))
        if "ts" in event:
            event["ts"] += shift
        if "id" in event:  # arrows between events: each rank counts its own
            event["id"] = f"{rank}-{event['id']}"
        if event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
        out.write("\n" if first else ",\n")
        out.write(json.dumps(event))
        first = False
        if event.get("ph") == "X" and event["name"].startswith(PHASE):
            yield event["name"].removeprefix(PHASE), event["dur"] / 1e6


def show(step: int, seconds: Seconds) -> None:
    """Print the phases, the longest first."""
    table = Table(title=f"step {step}, seconds by phase (one phase may hold another)")
    for name in ("phase", "shortest", "rank", "longest", "rank"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase, of_rank in sorted(seconds.items(), key=lambda item: -max(item[1].values())):
        least, most = min(of_rank, key=of_rank.__getitem__), max(of_rank, key=of_rank.__getitem__)
        cells = f"{of_rank[least]:.3f}", str(least), f"{of_rank[most]:.3f}", str(most)
        table.add_row(phase, *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
