"""Servers of the embedded engine, each in a process."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote import embedded
from pyrl_ext.rollout.remote.commands import PARENT
from pyrl_ext.rollout.remote.embedded_worker import SamplingBatch, Worker
from tests.helpers.configs import REPOSITORY
from tests.helpers.ranks import fork
from tests.helpers.tiny import CONFIG


@dataclass(frozen=True)
class SelfSignal:
    """A server's process sends itself a signal while it generates.

    Args:
        number: of the signal
        version: of the weights from which on it does
    """

    number: signal.Signals
    version: int


class _SignalsItself(Worker):
    """As `SelfSignal` says, once a request has six tokens and is to get more."""

    def __init__(self, engine: HFEngine, max_tokens: int, sends: SelfSignal):
        super().__init__(engine, max_tokens)
        self.sends = sends

    def _step(self, batch: SamplingBatch) -> None:
        for job in batch.jobs.values():
            is_due = (
                int(job.request.salt.split()[-1]) >= self.sends.version and len(job.token_ids) >= 6
            )
            if is_due and not job.request.request_id.startswith("canary"):
                time.sleep(5 * embedded.FLUSH_S)  # the client has some of them
                os.kill(os.getpid(), self.sends.number)
        super()._step(batch)


class _Server(embedded.EmbeddedServer):
    """A server with this worker."""

    sends: SelfSignal

    def __init__(self, engine: HFEngine, max_tokens: int, identity: dict[str, str] | None = None):
        super().__init__(engine, max_tokens, identity)
        self.worker = _SignalsItself(engine, max_tokens, self.sends)


def _serve(
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    said: Connection[str, str],
    sends: SelfSignal | None,
) -> None:
    """`python -m pyrl_ext.rollout.remote.embedded`, in a process whose imports are done."""
    if sends is not None:
        _Server.sends = sends
        embedded.EmbeddedServer = _Server
    os.environ.clear()
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    os.environ[PARENT] = str(os.getppid())
    os.chdir(REPOSITORY)
    os.dup2(said.fileno(), 1)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 2)
    sys.argv = [embedded.__name__, *arguments]
    sys.exit(embedded.main())


class ServerProcess:
    """A server that starts when it is made; `address` waits until it serves.

    Args:
        log: file for what it prints to stderr
        overrides: of the config
        port: 0: the kernel chooses one
        sends: a signal to itself; None: it lives until it is ended
    """

    def __init__(
        self,
        log: Path,
        overrides: Sequence[str] = (),
        port: int = 0,
        sends: SelfSignal | None = None,
    ):
        arguments = [str(CONFIG), *overrides, "--port", str(port)]
        self.said, printed = mp.Pipe(duplex=False)
        with printed:
            self.process = fork(_serve, arguments, dict(os.environ), log, printed, sends)
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
            with open(self.said.fileno(), encoding="utf-8", closefd=False) as lines:
                self._address = lines.readline().strip()
            assert self._address.startswith("http"), self._address
        return self._address

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill it; also one that is stopped."""
        self.process.kill()
        self.process.join()
        self.said.close()


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
