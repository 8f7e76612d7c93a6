"""Two hosts on one machine: two namespaces of the network and of processes, with a cable between
them, and torchrun in each. So no rank can read the memory of one on the other host.

The same steps on two hosts and on one must give the same numbers, and as many bytes of samples
cross the cable as ranks of one host read from each other; then the cable is pulled in the
middle of a run, and each side must stop within a minute and name the ranks of the other one.

    sudo python tests/two_hosts.py [--ranks-per-host 2]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pyrl_ext.metrics.sinks import read_rows

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SMALL = (
    *("batching.prompts=4", "batching.samples_per_prompt=4", "rollout.max_new_tokens=6"),
    *("log.progress=false", "evaluate.every=0", "checkpoint.every=2"),
)
WAYS = ("batch/moved_bytes", "batch/shared_bytes")
ADDRESSES = ("10.93.0.1", "10.93.0.2")  # nobody else sees them


def why_not() -> str | None:
    """Why this machine cannot make network namespaces; empty where it can."""
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            return f"there is no {command} command ({package})"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pyrl-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    ip("netns", "del", name)
    return None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, each with one interface, eth0, to the other."""
    names = (f"pyrl-{os.getpid()}-a", f"pyrl-{os.getpid()}-b")
    with ExitStack() as undo:
        for name in names:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ends = [word for name in names for word in ("name", "eth0", "netns", name)]
        ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names


@contextmanager
def started(hosts: tuple[str, str], ranks: int, folder: Path, steps: int) -> Iterator[list[Path]]:
    """The run on both hosts, ``ranks`` on each; their logs. What is left of it is killed."""
    logs = [folder.with_name(f"{folder.name}-{side}.log") for side in "ab"]
    processes = []
    try:
        for host, address, log in zip(hosts, ADDRESSES, logs, strict=True):
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"]
            # torchrun finds out by the host's name, which is the same on both
            meet += ["--local-addr", address, f"--rdzv-conf=is_host={address == ADDRESSES[0]}"]
            size = ["--nnodes", "2", "--nproc-per-node", str(ranks)]
            apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            command = ["ip", "netns", "exec", host, *apart, *TORCHRUN, *meet, *size]
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [*command, *training(folder, 2 * ranks, steps)],
                        cwd=ROOT,
                        env=environment() | {"GLOO_SOCKET_IFNAME": "eth0"},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield logs
    finally:
        for host, process in zip(hosts, processes):
            for pid in processes_on(host):
                with suppress(ProcessLookupError):  # the first of them takes the others along
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def processes_on(host: str) -> list[int]:
    pids = subprocess.run(["ip", "netns", "pids", host], check=True, capture_output=True, text=True)
    return list(map(int, pids.stdout.split()))


def ranks_on(host: str) -> list[int]:
    """Those that train; a process that ended and was not yet waited for has no command line."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in processes_on(host)}
    return [pid for pid, line in lines.items() if "pyrl_ext" in line and TORCHRUN[-1] not in line]


def training(folder: Path, ranks: int, steps: int) -> list[str]:
    own = [f"run={folder}", f"steps={steps}", f"parallel.dp={ranks}"]
    return ["-m", "pyrl_ext.train", "configs/tiny.yaml", *own, *SMALL]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def wait(what: str, done: Callable[[], bool], seconds: float, logs: list[Path]) -> float:
    """Seconds until ``done``. Raises: TimeoutError, with the ends of the logs."""
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > seconds:
            ends = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
            raise TimeoutError(f"{what}: not within {seconds} s\n{ends}")
        time.sleep(0.2)
    return time.monotonic() - start


def rows(folder: Path) -> list[dict[str, float]]:
    """The metrics without times, and without the ways that the samples' rows took."""
    lines = folder / "metrics.jsonl"
    other = ("time/", "tokens_per_s", *WAYS)
    return [
        {name: value for name, value in row.items() if not name.startswith(other)}
        for row in (read_rows(lines) if lines.exists() else [])
    ]


def moved(folder: Path) -> list[list[float]]:
    """Bytes of every step that crossed the cable, and that were read in shared memory."""
    return [[row[way] for way in WAYS] for row in read_rows(folder / "metrics.jsonl")]


def same_numbers(hosts: tuple[str, str], ranks: int, folder: Path) -> None:
    with started(hosts, ranks, folder / "two", steps=3) as logs:
        report = folder / "two/report.png"
        wait("three steps on two hosts", report.exists, 240, logs)
    one = [*TORCHRUN, "--standalone", "--nproc-per-node", str(2 * ranks)]
    command = [*one, *training(folder / "one", 2 * ranks, steps=3)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
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


def pulled_cable(hosts: tuple[str, str], ranks: int, folder: Path) -> None:
    with started(hosts, ranks, folder / "cable", steps=10_000) as logs:
        wait("three steps", lambda: len(rows(folder / "cable")) >= 3, 240, logs)
        ip("-n", hosts[0], "link", "set", "eth0", "down")
        spoken = [lambda log=log: log.read_text().count("\nerror: ") == ranks for log in logs]
        seconds = wait("an error on both sides", lambda: all(s() for s in spoken), 60, logs)
        seconds += wait("their end", lambda: not any(map(ranks_on, hosts)), 10, logs)
    print(f"cable pulled: all ranks have ended after {seconds:.0f} s")
    others = [range(ranks, 2 * ranks), range(ranks)]
    for log, there in zip(logs, others, strict=True):
        error = log.read_text().split("\nerror: ")[1].split("\n")[0]
        print(f"{log.stem[-1]}: {error}")
        for rank in there:
            assert f"rank {rank} (" in error, (rank, error)
        assert "of step " in error or "in step " in error, error
    assert ADDRESSES[0] in logs[1].read_text(), "the host of the store is named"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-per-host", type=int, default=1, choices=(1, 2))
    ranks = parser.parse_args().ranks_per_host
    if reason := why_not():
        sys.exit(f"two_hosts: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was made is undone
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        same_numbers(hosts, ranks, Path(folder))
        pulled_cable(hosts, ranks, Path(folder))


if __name__ == "__main__":
    main()
