"""Servers of the embedded engine, each in a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from pyrl_ext.rollout.servers.commands import PARENT
from tests.helpers.tiny import CONFIG

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server that starts when it is made; `address` waits until it serves.

    Args:
        log: file for what it prints to stderr
        overrides: of the config
        port: None: the kernel chooses one
    """

    def __init__(self, log: Path, overrides: Sequence[str] = (), port: int = 0):
        command = ["-m", "pyrl_ext.rollout.servers.embedded", str(CONFIG), *overrides]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--port", str(port)],
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=ROOT,
                env={**os.environ, PARENT: str(os.getpid())},
            )
        self._address = ""

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def address(self) -> str:
        if not self._address:
            assert self.process.stdout is not None
            self._address = self.process.stdout.readline().strip()
            assert self._address.startswith("http://"), self._address
        return self._address

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it; also one that is stopped."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def server_processes(
    folder: Path, count: int, overrides: Sequence[str] = ()
) -> Iterator[list[ServerProcess]]:
    """Several of them, which serve."""
    made = [ServerProcess(folder / f"server-{n}.log", overrides) for n in range(count)]
    try:
        for each in made:
            _ = each.address
        yield made
    finally:
        for each in made:
            each.end()
