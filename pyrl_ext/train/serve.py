"""Run the engines of this host.

Each engine is a server in a separate process group, with a log file. One that ends or no longer
answers is started again; it joins when the trainer next publishes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pyrl_ext.parallel.atomic_write import no_link
from pyrl_ext.parallel.open_files import SERVER_CONNECTIONS, allow_open_files, none_free
from pyrl_ext.parallel.ports import absence_at, process_on
from pyrl_ext.parallel.waiting import Wait
from pyrl_ext.plan.command import parse_plan, plan_parser

if TYPE_CHECKING:
    from pyrl_ext.rollout.remote.commands import Command

LOOK = 1.0  # between two looks at an engine [s]
SILENT = 5  # looks without an answer after which an engine that answered before has to go
PATIENCE = 10.0  # for an engine to exit [s]
TRIES = 3  # starts in a row that may fail


class Watched:
    """One engine: started, watched, started again.

    Args:
        command: of the engine
        log: file for what it prints
    """

    def __init__(self, command: Command, log: Path):
        self.command = command
        self.log = log
        self.failed = self.silent = 0
        self.answered = self.starved = self.distrusted = False
        self.start()

    def start(self) -> None:
        from pyrl_ext.rollout.remote.commands import PARENT

        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab", opener=no_link) as output:
            self.process = subprocess.Popen(
                [*self.command.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | dict(self.command.environment) | {PARENT: str(os.getpid())},
                start_new_session=True,  # a process group that can be ended as a whole
            )
        self.answered = False
        self.silent = 0
        self.wait = Wait(f"{self.command.address} to answer", None, f"It logs to {self.log}", say)

    def look(self) -> None:
        """Start it again if it ended or answers no more, unless it may open no further file.

        Raises: RuntimeError when it ended before it answered, `TRIES` times in a row, or once if
            another process has its port.
        """
        status = self.process.poll()
        address = self.command.address
        absence = absence_at(address, PATIENCE, self.command.tls) if status is None else None
        if status is None and absence is None:
            if not self.answered:
                say(f"{address} answers")
            self.answered = True
            self.silent = 0
            self.failed = 0
            self.starved = False
            self.distrusted = False
            return
        starved = none_free(self.process.pid) if status is None and self.answered else None
        if starved is not None:  # it works, and answers again once connections are closed
            if not self.starved:
                say(f"{address} cannot answer: {starved}. Close its port to strangers")
            self.starved = True
            return
        if absence is not None and absence.is_distrusted and self.answered:
            if not self.distrusted:
                say(f"{address} is not trusted: {absence.reason}. It is not started again")
            self.distrusted = True
            return
        self.silent += self.answered
        if status is None and self.silent < SILENT:
            if absence is not None and not self.answered:
                self.wait.goes_on(absence.reason)
            return
        why = f"ended with status {status}" if status is not None else "no longer answers"
        self.end(signal.SIGKILL)
        self.failed += not self.answered
        if not self.answered:
            require_free(address)
        if self.failed >= TRIES:
            raise RuntimeError(
                f"{address} {why} before it answered, {TRIES} times, expected it to serve. "
                f"See {self.log}"
            )
        say(f"{address} {why}; it is started again, and joins at the next publish")
        self.start()

    def end(self, number: signal.Signals) -> None:
        """Signal the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Wait until it exits; then kill what is left of its group."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        self.end(signal.SIGKILL)
        self.process.wait()


def require_free(address: str) -> None:
    """Raises: RuntimeError naming the process that holds the port of an engine to be started."""
    url = urlsplit(address)
    holder = process_on(url.hostname or "", url.port or 80)
    if holder is not None:
        raise RuntimeError(
            f"serve: port {url.port} is held by {holder}, expected it to be free for the engine "
            f"{address}. End that process, or choose another port in rollout.servers or "
            "rollout.launch"
        )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def watch(commands: Sequence[Command], logs: Path) -> None:
    """Keep the engines running until SIGTERM or SIGINT, which raise SystemExit here.

    Raises: RuntimeError when a process holds the port of an engine, or as `Watched.look`.
    """
    engines: list[Watched] = []
    allow_open_files(SERVER_CONNECTIONS)  # also to the engines
    try:
        for command in commands:
            require_free(command.address)
            log = logs / f"engine-{urlsplit(command.address).port}.log"
            engines.append(Watched(command, log))
            say(f"{command.address} is started; log in {log}")
        while True:
            time.sleep(LOOK)
            for engine in engines:
                engine.look()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for engine in engines:
            engine.end(signal.SIGTERM if engine.answered else signal.SIGKILL)
        for engine in engines:
            engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: printed; 1: an engine does not start; 2: the plan does not hold; 130: Ctrl-C."""
    parser = plan_parser("pyrl_ext.train.serve", __doc__)
    parser.add_argument("--print", action="store_true", help="print the command of each engine")
    parser.add_argument("--host", help="whose engines; left out: those of this machine")
    options, plan = parse_plan(parser, arguments)
    if plan is None:
        return 2
    from pyrl_ext.rollout.remote.commands import commands_of  # brings torch

    try:
        commands = commands_of(plan, options.overrides, options.host)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.print:
        print("\n".join(map(str, commands)))
        return 0

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        watch(commands, Path(plan.run))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"serve: {error}, expected run {plan.run} to be a folder for logs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
