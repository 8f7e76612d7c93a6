"""Two hosts on one machine: namespaces of the network and of processes, with a cable between
them, and torchrun in each. So no rank can read the memory of one on the other host.

The same steps on two hosts and on one must give the same numbers, and as many bytes of samples
cross the cable as ranks of one host read from each other; then the cable is pulled in the
middle of a run, and each side must stop within a minute and name the ranks of the other one.

    sudo python -m tests.two_hosts [--ranks-per-host 2]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyrl_ext.metrics.sinks import read_rows
from tests.helpers.hosts import ROOT, TORCHRUN, Host, hosts, ip, train_on, wait, why_not
from tests.helpers.rows import MEASURED

SMALL = (
    "batching.prompts=4",
    "batching.samples_per_prompt=4",
    "rollout.max_new_tokens=6",
    "log.progress=false",
    "evaluate.every=0",
    "checkpoint.every=2",
)
WAYS = ("batch/moved_bytes", "batch/shared_bytes")


@contextmanager
def started(places: Sequence[Host], ranks: int, folder: Path, steps: int) -> Iterator[list[Path]]:
    """The run on both hosts, ``ranks`` on each; their logs. What is left of it is killed."""
    logs = [folder.with_name(f"{folder.name}-{side}.log") for side in "ab"]
    processes = train_on(places, ranks, training(folder, 2 * ranks, steps), logs)
    try:
        yield logs
    finally:
        for host, process in zip(places, processes):
            host.end()
            process.wait()


def training(folder: Path, ranks: int, steps: int) -> list[str]:
    own = [f"run={folder}", f"steps={steps}", f"parallel.dp={ranks}"]
    return ["configs/tiny.yaml", *own, *SMALL]


def rows(folder: Path) -> list[dict[str, float]]:
    """The metrics without times, and without the ways that the samples' rows took."""
    lines = folder / "metrics.jsonl"
    other = (*MEASURED, *WAYS)
    return [
        {name: value for name, value in row.items() if not name.startswith(other)}
        for row in (read_rows(lines) if lines.exists() else [])
    ]


def moved(folder: Path) -> list[list[float]]:
    """Bytes of every step that crossed the cable, and that were read in shared memory."""
    return [[row[way] for way in WAYS] for row in read_rows(folder / "metrics.jsonl")]


def same_numbers(places: Sequence[Host], ranks: int, folder: Path) -> None:
    with started(places, ranks, folder / "two", steps=3) as logs:
        report = folder / "two/report.png"
        wait("three steps on two hosts", report.exists, 240, logs)
    one = [*TORCHRUN, "--standalone", "--nproc-per-node", str(2 * ranks)]
    command = [*one, "-m", "pyrl_ext.train", *training(folder / "one", 2 * ranks, steps=3)]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=own, check=True, capture_output=True)
    assert len(rows(folder / "one")) == 3
    assert rows(folder / "one") == rows(folder / "two"), (
        rows(folder / "one"),
        rows(folder / "two"),
    )
    pairs = [*zip(moved(folder / "one"), moved(folder / "two"), strict=True)]
    assert all(not cable and here > 0 for (cable, here), _ in pairs), pairs
    assert all(cable > 0 and (here > 0) == (ranks > 1) for _, (cable, here) in pairs), pairs
    assert all(sum(one) == sum(two) for one, two in pairs), pairs
    print(f"two hosts with {ranks} ranks each: the numbers of one host with {2 * ranks}")
    print(f"bytes of samples over the cable: {[cable for _, (cable, _) in pairs]}")


def pulled_cable(places: Sequence[Host], ranks: int, folder: Path) -> None:
    with started(places, ranks, folder / "cable", steps=10_000) as logs:
        wait("three steps", lambda: len(rows(folder / "cable")) >= 3, 240, logs)
        ip("-n", places[0].name, "link", "set", "eth0", "down")
        spoken = [lambda log=log: log.read_text().count("\nerror: ") == ranks for log in logs]
        seconds = wait("an error on both sides", lambda: all(s() for s in spoken), 60, logs)
        seconds += wait("their end", lambda: not any(host.ranks() for host in places), 10, logs)
    print(f"cable pulled: all ranks have ended after {seconds:.0f} s")
    others = [range(ranks, 2 * ranks), range(ranks)]
    for log, there in zip(logs, others, strict=True):
        error = log.read_text().split("\nerror: ")[1].split("\n")[0]
        print(f"{log.stem[-1]}: {error}")
        for rank in there:
            assert f"rank {rank} (" in error, (rank, error)
        assert "of step " in error or "in step " in error, error
    assert places[0].address in logs[1].read_text(), "the host of the store is named"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-per-host", type=int, default=1, choices=(1, 2))
    ranks = parser.parse_args().ranks_per_host
    if reason := why_not():
        sys.exit(f"two_hosts: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was made is undone
    with tempfile.TemporaryDirectory() as folder, hosts(2) as places:
        same_numbers(places, ranks, Path(folder))
        pulled_cable(places, ranks, Path(folder))


if __name__ == "__main__":
    main()
