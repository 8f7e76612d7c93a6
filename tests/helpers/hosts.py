"""Hosts on this machine: namespaces of the network and of processes, on one switch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.python_path import python_path

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
PORT = 29400  # where ranks meet


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
    bridge = ["ip", "-n", name, "link", "add", "switch", "type", "bridge"]
    made = subprocess.run(bridge, capture_output=True, text=True)
    ip("netns", "del", name)
    return f"ip link add type bridge: {made.stderr.strip()}" if made.returncode else None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@dataclass(frozen=True)
class Host:
    """A namespace, whose interface eth0 has a cable to the switch.

    Args:
        name: of the namespace
        address: that nobody but the other hosts sees
    """

    name: str
    address: str

    def start(self, command: Sequence[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
        """Run a command there, in a namespace of processes; ``more``: its environment."""
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT)}
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *APART, *command],
                cwd=ROOT,
                env={**os.environ, **own, **more},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        command = ["ip", "netns", "pids", self.name]
        pids = subprocess.run(command, check=True, capture_output=True, text=True)
        return list(map(int, pids.stdout.split()))

    def ranks(self) -> dict[int, int]:
        """Rank -> process of those that train."""
        found: dict[int, int] = {}
        for pid in self.processes():
            with suppress(FileNotFoundError, ProcessLookupError):
                line = Path(f"/proc/{pid}/cmdline").read_text()
                # a process that ended and was not yet waited for has no command line
                if "pyrl_ext.train" in line and TORCHRUN[-1] not in line:
                    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
                    found[int(dict(w.split("=", 1) for w in words if "=" in w)["RANK"])] = pid
        return found

    def end(self) -> None:
        """Kill all that runs there; the first process of a namespace takes the others along."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts; what still runs there at the end is killed."""
    switch = f"pyrl-{os.getpid()}-switch"
    with ExitStack() as undo:
        ip("netns", "add", switch)
        undo.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        made: list[Host] = []
        for number in range(count):
            host = Host(f"pyrl-{os.getpid()}-{number}", f"10.93.0.{number + 1}")
            ip("netns", "add", host.name)
            undo.callback(ip, "netns", "del", host.name)
            undo.callback(host.end)
            here = ("name", "eth0", "netns", host.name)
            there = ("name", host.name, "netns", switch)
            ip("link", "add", *here, "type", "veth", "peer", *there)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
            ip("-n", switch, "link", "set", host.name, "master", "switch", "up")
            made.append(host)
        yield made


def train_on(
    places: Sequence[Host], ranks: int, training: Sequence[str], logs: Sequence[Path]
) -> list[subprocess.Popen[bytes]]:
    """Start the command on each of these hosts, with ``ranks`` ranks there."""
    started: list[subprocess.Popen[bytes]] = []
    for host, log in zip(places, logs, strict=True):
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{places[0].address}:{PORT}"]
        # torchrun finds out by the host's name, which is the same on all
        meet += ["--local-addr", host.address, f"--rdzv-conf=is_host={host is places[0]}"]
        size = ["--nnodes", str(len(places)), "--nproc-per-node", str(ranks)]
        command = [*TORCHRUN, *meet, *size, "-m", "pyrl_ext.train", *training]
        started.append(host.start(command, log, GLOO_SOCKET_IFNAME="eth0"))
    return started


def wait(what: str, done: Callable[[], bool], seconds: float, logs: Sequence[Path]) -> float:
    """Seconds until ``done``. Raises: TimeoutError, with the ends of the logs."""
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > seconds:
            ends = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
            raise TimeoutError(f"{what}: not within {seconds} s\n{ends}")
        time.sleep(0.2)
    return time.monotonic() - start
